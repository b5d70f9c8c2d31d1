"""Times of operators while the program runs, and files of them for Perfetto."""
