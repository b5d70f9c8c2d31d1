"""Two tools for Amanda, in a package of somebody else."""
