"""Checks an archive of `torch.save` before it is loaded.

`torch.load(weights_only=True)` does not run code from the file, but a hostile file can still harm it:

- compressed members, and constructors with huge arguments, allocate memory without bound;
- a key that is a deeply nested tuple takes for ever to compute.

So the archive must have the plain form that `torch.save` writes. Its pickle may use only a few harmless names.
"""

import pickletools
import struct
import sys
import zipfile
from pathlib import Path

import torch

from palimpsest.errors import WeightsError

LARGEST_PICKLE = 1 << 25  # bytes: names and shapes only; tensors lie beside it
MOST_OPERATIONS = 400_000  # about ten thousand tensors
LARGEST_TUPLE = 10_000  # with its content, counted as often as it occurs: this is the cost of hashing it
END = struct.Struct("<4s4H2LH")  # the zip directory's end; the last field is the length of a comment
NAMES = {
    "argparse Namespace",
    "collections Counter",
    "collections OrderedDict",
    "torch device",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_tensor_v2",
    "torch Size",
    *(f"torch {name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    *(f"torch {kind}Storage" for kind in "BFloat16 Bool Byte Char Double Float Half Int Long Short".split()),
}
OPERATIONS = set(
    "PROTO FRAME STOP MARK POP POP_MARK PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL REDUCE BUILD"
    " BINPERSID NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8"
    " NEWOBJ EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 SETITEM SETITEMS APPEND APPENDS".split()
)


SAVE_AGAIN = "save model.state_dict() again, best as .safetensors"


class _NotPlainError(Exception):
    """Says what is wrong with an archive, and what to do."""

    def __init__(self, reason: str, remedy: str = SAVE_AGAIN) -> None:
        super().__init__(f"{reason}; {remedy}")


def check(path: Path) -> None:
    """Refuse an archive that is not plain."""
    try:
        if not zipfile.is_zipfile(path):
            raise _NotPlainError("is not an archive of torch.save, or is incomplete")
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_members(archive, members, path)
            program = archive.read(next(m for m in members if m.filename.endswith("/data.pkl")))
        _check_program(program, path)
    except Exception as error:  # damaged bytes make their readers raise anything at all
        reason = error if isinstance(error, _NotPlainError) else _NotPlainError("is damaged")
        raise WeightsError(f"{path} {reason}") from error


def _check_members(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo], path: Path) -> None:
    """One folder of uncompressed members, laid out so that every reader of archives sees the same ones."""
    names = [member.filename.lower() for member in members]  # torch does not distinguish a and A
    one_folder = len({name.partition("/")[0] for name in names}) == 1
    pickles = [member for member in members if member.filename.endswith("/data.pkl")]
    if len(pickles) != 1 or not one_folder or len(set(names)) != len(names) or pickles[0].flag_bits & 1:
        raise _NotPlainError("is not an archive of weights")
    total, length = sum(member.file_size for member in members), path.stat().st_size
    if any(member.compress_type != zipfile.ZIP_STORED for member in members) or total > length:
        raise _NotPlainError("is compressed")
    if pickles[0].file_size > LARGEST_PICKLE:
        raise _NotPlainError("has a description of its tensors that is too long")
    with path.open("rb") as file:
        file.seek(length - END.size)
        signature, *_, start, comment = END.unpack(file.read(END.size))
    elsewhere = start not in (archive.start_dir, 0xFFFFFFFF)
    if signature != b"PK\5\6" or comment or elsewhere or min(member.header_offset for member in members) != 0:
        raise _NotPlainError("has data before or after its archive")


def _remedy(path: Path, name: str, *, whole: bool) -> str:
    """The two lines that convert a pickled network, or a checkpoint with other objects, if it is not an attack."""
    if name.partition(" ")[0].partition(".")[0] in {*sys.stdlib_module_names, "__builtin__"}:
        return SAVE_AGAIN
    weights, which = ("saved.state_dict()", "") if whole else ('saved["model"]', ", with the entry of the state dict")
    load = f"saved = torch.load({str(path)!r}, weights_only=False)"
    save = f"torch.save({weights}, {str(path.with_name(f'{path.stem}-weights.pt'))!r})"
    return f"if you trust the file, convert it by the lines {load} and {save}{which}"


def _check_program(program: bytes, path: Path) -> None:
    """Walk through a pickle without running it. Of every value only its size as a tuple is kept."""
    stack: list[int | None] = []  # None: a mark
    memo: dict[int, int] = {}
    for count, (operation, argument, _) in enumerate(pickletools.genops(program)):
        name = operation.name
        if name == "GLOBAL" and argument not in NAMES:
            what = f"{str(argument).replace(' ', '.')[:80]}, but only dense real tensors and plain values are allowed"
            raise _NotPlainError(f"holds {what}", _remedy(path, str(argument), whole=count <= 1))
        if name not in OPERATIONS:
            raise _NotPlainError("holds Python objects, but only dense real tensors and plain values are allowed")
        if count > MOST_OPERATIONS:
            raise _NotPlainError("has a description of its tensors that is too long")
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else int(argument)] = stack[-1] or 1  # type: ignore[arg-type]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument)])  # type: ignore[arg-type]
        else:
            _apply(operation, stack)
        if stack and (stack[-1] or 0) > LARGEST_TUPLE:
            raise _NotPlainError("holds tuples that are nested too deeply")


def _apply(operation: pickletools.OpcodeInfo, stack: list[int | None]) -> None:
    """Apply an operation to the stack of sizes. A tuple is as large as its content."""
    before, after = operation.stack_before, operation.stack_after
    taken = 0
    if pickletools.markobject in before:
        while (value := stack.pop()) is not None:
            taken += value
        before = before[: before.index(pickletools.markobject)]
    for _ in before:
        taken += stack.pop() or 0
    is_tuple = operation.name.startswith("TUPLE")
    stack += [None if kind is pickletools.markobject else 1 + taken * is_tuple for kind in after]
