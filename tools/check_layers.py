#!/usr/bin/env python3
"""Checks what the compiler does not: the order of folders, and conventions of files.

    tools/check_layers.py [ROOT]      ROOT: the repository (default: the one this file is in)

Prints one line per violation, FILE:LINE: TEXT, and exits with 1 when there is any.

  layers          #include "a/b.h" only as tools/layers.txt declares for the including file's folder
  existence       the path of such an include is a file, written from the repository's root
  no torch        files that layers.txt declares free of LibTorch include none of it, nor a file that does
  guards          the include guard of a/b_c.h is A_B_C_H_, and names the same in all three lines
  machine paths   no file names a folder of one machine or user (a home, a temporary folder)

Folders that begin with a dot or with "bazel-" are not read, nor are third_party (others' code), runs (output) and what
is no text by its name.
"""

import os
import re
import sys

CODE = (".h", ".cc")
TEXT = CODE + (".py", ".bzl", ".sh", ".md", ".toml", ".txt", ".BUILD")
TEXT_NAMES = ("BUILD", "WORKSPACE", ".bazelrc", ".gitignore", "bazelw")
SKIPPED_FOLDERS = ("third_party", "runs", "__pycache__")

QUOTED = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
ANGLED = re.compile(r"^\s*#\s*include\s+<([^>]+)>")
TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
# A path that begins here: not the end of a longer one, such as $HOME/tmp/ or "src/home/".
MACHINE_PATH = re.compile(r"(?<![\w.}~/-])/(?:home|root|work|tmp|mnt|Users)/[\w.-]+")


class Layers:
    """What tools/layers.txt says."""

    def __init__(self, lines):
        self.allowed = {}  # folder -> folders it may include
        self.no_torch = []  # starts of paths
        self.errors = []  # (line number, text), of layers.txt itself
        for number, line in enumerate(lines, 1):
            line = line.split("#")[0].strip()
            if not line:
                continue
            folder, colon, rest = line.partition(":")
            if not colon:
                self.errors.append((number, f"expected FOLDER: FOLDER..., found '{line}'"))
            elif folder == "no_torch":
                self.no_torch += rest.split()
            elif folder in self.allowed:
                self.errors.append((number, f"folder {folder} stands here a second time"))
            else:
                above = list(self.allowed)
                names = above if rest.strip() == "*" else rest.split()
                for name in names:
                    if name not in above:
                        self.errors.append((number, f"{folder} may include only folders above it, not {name}"))
                self.allowed[folder] = set(names) | {folder}

    def is_free_of_torch(self, path):
        return any(path.startswith(start + "/") if start in self.allowed else path.startswith(start)
                   for start in self.no_torch)


def list_files(root):
    """Paths of the repository's text files, from its root."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith((".", "bazel-")) and f not in SKIPPED_FOLDERS)
        for name in sorted(names):
            path = os.path.join(folder, name)
            if (name.endswith(TEXT) or name in TEXT_NAMES) and os.path.isfile(path):
                yield os.path.relpath(path, root).replace(os.sep, "/")


def includes(lines, pattern):
    """(line number, path) of the includes that match."""
    return [(n, m.group(1)) for n, m in ((n, pattern.match(line)) for n, line in enumerate(lines, 1)) if m]


def check_includes(path, lines, layers, files):
    folder = path.split("/")[0]
    if "/" not in path or folder not in layers.allowed:
        yield 1, f"folder {folder} has code but no line in tools/layers.txt"
        return
    for number, included in includes(lines, QUOTED):
        target = included.split("/")[0]
        if included not in files:
            yield number, f'no file "{included}"; paths are written from the root of the repository'
        elif target not in layers.allowed[folder]:
            yield number, (f"{folder} may not include {target} ({included}); "
                           f"tools/layers.txt allows {', '.join(sorted(layers.allowed[folder]))}")
    for number, included in includes(lines, ANGLED):
        if included in files:
            yield number, f"<{included}> is ours: write it with quotes"


def way_to_torch(path, files, seen):
    """(line number, text) for the first include of `path` that leads to LibTorch, or None."""
    seen.add(path)
    for number, included in includes(files[path], ANGLED):
        if TORCH.match(included):
            return number, f"<{included}>"
    for number, included in includes(files[path], QUOTED):
        if included in files and included not in seen:
            way = way_to_torch(included, files, seen)
            if way:
                return number, f"{included}, {way[1]}"
    return None


def check_guard(path, lines):
    expected = re.sub(r"[^A-Z0-9]", "_", path.upper()) + "_"
    code = [(n, line.strip()) for n, line in enumerate(lines, 1) if line.strip() and not line.startswith("//")]
    wanted = [(0, f"#ifndef {expected}"), (1, f"#define {expected}"), (-1, f"#endif  // {expected}")]
    for position, text in wanted:
        number, found = code[position] if len(code) >= 3 else (1, "")
        if found != text:
            yield number, f"include guard: expected '{text}', found '{found}'"


def check_machine_paths(lines):
    for number, line in enumerate(lines, 1):
        match = MACHINE_PATH.search(line)
        if match:
            yield number, f"names a path of one machine: {match.group(0)}"


def check(root):
    """All violations of the tree, as (path, line number, text)."""
    def read(path):
        with open(os.path.join(root, path), encoding="utf-8") as file:
            return file.read().split("\n")

    files = {path: read(path) for path in list_files(root)}
    layers = Layers(files.get("tools/layers.txt", []))
    violations = [("tools/layers.txt", *error) for error in layers.errors]
    if not layers.allowed:
        return [("tools/layers.txt", 1, "is missing or declares no folder")]
    code = {path: lines for path, lines in files.items() if path.endswith(CODE)}
    for start in layers.no_torch:
        if start not in layers.allowed and not any(path.startswith(start) for path in code):
            violations.append(("tools/layers.txt", 1, f"no_torch: there is no file {start}*"))
    for path, lines in files.items():
        found = list(check_machine_paths(lines))
        if path in code:
            found += check_includes(path, lines, layers, code)
            way = way_to_torch(path, code, set()) if layers.is_free_of_torch(path) else None
            if way:
                found.append((way[0], f"is declared free of LibTorch, but includes {way[1]}"))
        if path.endswith(".h"):
            found += check_guard(path, lines)
        violations += [(path, *violation) for violation in found]
    return violations


def main(arguments):
    root = arguments[0] if arguments else os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    violations = check(root)
    for path, number, text in violations:
        print(f"{path}:{number}: {text}")
    num_files = sum(1 for path in list_files(root) if path.endswith(CODE))
    print(f"{num_files} files of code, {len(violations)} violations")
    if num_files == 0:
        print(f"no code under {root}: is it the repository?")
    return 1 if violations or num_files == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
