"""A framework of two operators on plain numbers. It knows nothing of Amanda."""


class Number:
    """The framework's tensor."""

    def __init__(self, value: float) -> None:
        self.value = value


def execute(name: str, inputs: list[Number]) -> Number:
    """Run an operator."""
    left, right = (number.value for number in inputs)
    return Number(left + right if name == "add" else left * right)


def add(left: Number, right: Number) -> Number:
    """The sum."""
    return execute("add", [left, right])


def mul(left: Number, right: Number) -> Number:
    """The product."""
    return execute("mul", [left, right])
