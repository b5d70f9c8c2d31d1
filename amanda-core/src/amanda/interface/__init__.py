"""The classes that tools and drivers are written against."""
