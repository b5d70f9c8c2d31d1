"""A tool and a driver for Amanda, from outside of its repository."""
