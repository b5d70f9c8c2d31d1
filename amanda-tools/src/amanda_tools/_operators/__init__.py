"""Facts about operators shared by tools: kinds, weights, signatures, cost, source lines."""
