"""Data only: what people look at."""
