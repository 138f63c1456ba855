"""A kernel launch as data: run it, or compile it for an architecture that is not here."""

from typing import Any, NamedTuple

import torch

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}


class Launch(NamedTuple):
    """kernel: a JIT function. args: its run-time arguments. constants: its constexpr arguments. options: num_warps ..."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](*self.args, **self.constants, **self.options)

    def compile(self, target: Any) -> Any:
        """Triton's compiled kernel for a GPUTarget, specialised as the launch would be. Tensors may be meta."""
        import triton
        from triton.compiler import ASTSource

        signature, constants, attributes = {}, dict(self.constants), {}
        for i, (name, arg) in enumerate(zip(self.kernel.arg_names, self.args, strict=False)):
            if arg is None or (isinstance(arg, int) and arg == 1):
                signature[name], constants[name] = "constexpr", arg
                continue
            address = arg.data_ptr() if isinstance(arg, torch.Tensor) else arg
            signature[name] = _TYPES[arg.dtype] if isinstance(arg, torch.Tensor) else "i32" if arg < 2**31 else "i64"
            if address % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        signature |= dict.fromkeys(self.constants, "constexpr")
        return triton.compile(ASTSource(self.kernel, signature, constants, attributes), target=target, options=self.options)
