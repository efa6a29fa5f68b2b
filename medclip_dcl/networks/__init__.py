"""Networks that describe and rebuild themselves, and the initialisation of one from existing weights."""
