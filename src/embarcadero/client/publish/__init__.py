"""From records to outcomes: batches, their way out, and what is lost of them."""
