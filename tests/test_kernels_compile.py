"""Every Triton kernel compiles for the GPUs it is made for, without one: no error, no spilled registers, memory enough.

A file below ops/kernels/ that has Triton kernels has a list `COMPILED` of

    (kernel, {argument: type}, {constant: value}, {"num_warps": ..., "num_stages": ...})

whose types are Triton's, such as "*bf16", "*fp32", "i32". Pointers are taken to be divisible by 16. To see registers,
spills and shared memory of each:

    python -m tests.test_kernels_compile meshwright.ops.kernels.delta_rule 90 100
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[1] / "meshwright" / "ops" / "kernels"
FILES = sorted(path.stem for path in KERNELS.glob("*.py") if "\nCOMPILED" in path.read_text("utf-8"))
SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}  # that one block may take on A100, H100 and B200
FULL_NAMES = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
SPILLED = 512  # bytes a thread, half of what 255 registers hold: more would be a kernel that does not fit


def compiled(kernel, types, constants, options, capability):
    """Compile one kernel; return its name and what the assembler says."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    assert set(names) == types.keys() | constants.keys(), set(names) ^ (types.keys() | constants.keys())
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
        file.write(made.asm["ptx"].encode())
        file.flush()
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        # Triton ships a second assembler for the newest GPUs.
        ptxas = next(
            tools / name for name in ("ptxas-blackwell", "ptxas") if capability < 100 or (tools / name).exists()
        )
        ptxas = tools / "ptxas" if capability < 100 else ptxas
        command = [ptxas, "-v", f"--gpu-name={FULL_NAMES[capability]}", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    registers, stored, loaded = (
        int(re.search(pattern, said.stderr)[1])
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    )
    flags = {name: value for name, value in constants.items() if value is True}
    return {
        "kernel": kernel.__name__, **flags, "sm": capability, **options, "registers": registers,
        "spilled": max(stored, loaded), "shared": made.metadata.shared,
    }  # fmt: skip


def main():
    """Print a line of JSON for each kernel of a module and each target."""
    module, *capabilities = sys.argv[1:]
    for capability in map(int, capabilities):
        for each in import_module(module).COMPILED:
            print(json.dumps(compiled(*each, capability)), flush=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("file", FILES)
def test_kernels_compile(file, capability, tmp_path):
    """In a process of its own: in this one kernels are interpreted."""
    pytest.importorskip("triton", reason="triton is not installed, which compiles the kernels")
    command = [sys.executable, "-m", "tests.test_kernels_compile", f"meshwright.ops.kernels.{file}", str(capability)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=KERNELS.parents[2],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    actual = [json.loads(line) for line in ran.stdout.splitlines()]
    assert actual
    for each in actual:
        assert each["spilled"] <= SPILLED, each
        assert each["shared"] <= SHARED_BYTES[capability], each


if __name__ == "__main__":
    main()
