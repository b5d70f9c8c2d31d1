"""Values of tensors: reading, arithmetic, statistics, shapes, files."""
