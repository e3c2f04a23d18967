"""Answers that are too large, or too dear, to be found twice in one state of a lake."""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

from viewer.queries import Reads

P = ParamSpec("P")
T = TypeVar("T")


def once(
    most: int,
) -> Callable[[Callable[Concatenate[Reads, P], T]], Callable[Concatenate[Reads, P], T]]:
    """Have a query remember its last answers, `most` of them over all readers, as long as the reader lives.

    Unlike `functools.lru_cache` it keeps no reader: with one go its connections, and the answers at the next question.
    Arguments must be hashable, and answers are shared: nobody may change them.
    """

    def remembering(query: Callable[Concatenate[Reads, P], T]) -> Callable[Concatenate[Reads, P], T]:
        known: OrderedDict[tuple[Hashable, ...], T] = OrderedDict()
        lock = threading.Lock()

        @wraps(query)
        def ask(lake: Reads, /, *args: P.args, **kwargs: P.kwargs) -> T:
            key = (weakref.ref(lake), args, tuple(sorted(kwargs.items())))
            with lock:
                for one in [one for one in known if cast("weakref.ref[Reads]", one[0])() is None]:
                    del known[one]
                if key in known:
                    known.move_to_end(key)
                    return known[key]
            answer = query(lake, *args, **kwargs)
            with lock:
                known[key] = answer
                while len(known) > most:
                    known.popitem(last=False)
            return answer

        return ask

    return remembering
