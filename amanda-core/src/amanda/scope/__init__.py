"""The with-block of ``amanda.apply`` from entry to exit, and the switches inside it."""
