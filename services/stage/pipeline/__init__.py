"""How stages become a pipeline and stay one: cards, the handshake, epochs, pings. Knows no job and
no engine."""
