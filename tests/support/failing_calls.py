"""Functions of which chosen calls raise an error."""


class FailingCalls:
    """Replaces a function by one that counts its calls and fails at some of them.

    Args:
        monkeypatch: the fixture that restores the function.
        place: the object that holds the function, and the name of its attribute.
        at: indices of the failing calls, from 0 on; None is all calls.
        error: an instance of the error, without state other than its arguments.
    """

    def __init__(self, monkeypatch, place, at, error):
        holder, name = place
        self.original, self.at, self.error = getattr(holder, name), at, error
        self.calls, self.raised = 0, 0
        monkeypatch.setattr(holder, name, lambda *args, **kwargs: self(*args, **kwargs))

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.at is None or self.calls - 1 in self.at:
            self.raised += 1
            # A copy: the traceback of a stored exception would keep the tensors of the failed call alive.
            raise type(self.error)(*self.error.args)
        return self.original(*args, **kwargs)
