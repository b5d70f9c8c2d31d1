"""Facts about operators that tools share: types, parameters, shapes, cost, lines of source code."""
