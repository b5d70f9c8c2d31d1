"""Which operator of a graph computes a gradient of which forward operator."""
