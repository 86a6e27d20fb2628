"""HTTP itself: connections and their limits, bodies, events, answers on their way. Knows no job."""
