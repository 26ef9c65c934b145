"""A compiled function taken from an instance, as a method is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainstep._function.function import Function


class BoundFunction:
    """A `Function` taken from an instance, as a method is."""

    def __init__(self, function: Function[..., Any], instance: Any) -> None:
        self.__func__ = function
        self.__self__ = instance
        self.__doc__ = function.__doc__
        self.__wrapped__ = getattr(function, "__wrapped__", function).__get__(instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """See `Function.warm_up`."""
        self.__func__.warm_up(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return f"<bound {self.__func__!r} of {self.__self__!r}>"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BoundFunction)
            and self.__func__ is other.__func__
            and self.__self__ is other.__self__
        )

    def __hash__(self) -> int:
        return hash((id(self.__func__), id(self.__self__)))
