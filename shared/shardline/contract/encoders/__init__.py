"""What encoders make of texts, and what doors know of them."""
