"""Errors of a client's requests."""


class UserError(Exception):
    """A request that cannot work, in a sentence for the client. The future of the request fails
    with category ``user``.
    """


class BadRequest(Exception):
    """A request that cannot be read, so that it has no future. It is answered at once with
    ``status``.
    """

    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.status = status


def require(condition: object, problem: str) -> None:
    """Raise UserError with ``problem`` unless ``condition`` is true."""
    if not condition:
        raise UserError(problem)
