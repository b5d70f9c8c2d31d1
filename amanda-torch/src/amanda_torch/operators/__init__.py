"""Operators of PyTorch as tools see them: names, signatures, flat inputs."""
