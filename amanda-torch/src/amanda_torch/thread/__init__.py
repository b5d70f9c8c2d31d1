"""State of one thread: the module stack and the active interceptor."""
