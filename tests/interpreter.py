"""Triton's interpreter, as we need it: it works with numpy 2.4, and costs half.

At each call of a kernel's function it looks through all of `triton.language` for what it has to replace, though within
a kernel that is replaced already; and for each number it makes a table of all types anew.
"""

from functools import cache
from inspect import ismodule
from typing import Any

from triton.runtime import interpreter


def prepare() -> None:
    """Mend what is named above, for this process."""
    patch_tensor, patch_builtins, np_dtype = (
        interpreter._patch_lang_tensor,
        interpreter._patch_lang,
        interpreter._get_np_dtype,
    )

    def patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
        """The interpreter calls int() on arrays of one element, which numpy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        """What the kernel that runs has replaced, and in which modules."""

        inside: "Scope | None" = None

        def __init__(self) -> None:
            super().__init__()
            self.modules: set[str] = set()

        def restore(self) -> None:
            super().restore()
            Scope.inside = None

    def patch_once(fn: Any) -> Any:
        scope = Scope.inside
        is_outermost = scope is None
        if scope is None:
            scope = Scope.inside = Scope()
        modules = {each.__name__ for each in fn.__globals__.values() if ismodule(each) and each in languages}
        if not modules <= scope.modules:
            scope._changes += patch_builtins(fn)._changes
            scope.modules |= modules
        return scope if is_outermost else None

    languages = (interpreter.tl, interpreter.tl.core)
    scalar = cache(np_dtype)

    def np_dtype_once(dtype: Any) -> Any:
        if isinstance(dtype, interpreter.tl.block_type):
            dtype = dtype.element_ty
        return np_dtype(dtype) if isinstance(dtype, interpreter.tl.pointer_type) else scalar(dtype)

    interpreter._patch_lang_tensor = patch_tensor_for_numpy
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = np_dtype_once
