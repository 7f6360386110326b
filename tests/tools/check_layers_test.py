"""Goal: tools/check_layers.py finds each kind of violation, and nothing in a tree without any.

Method: small trees in a temporary folder, each good but for one thing.
"""

import os
import subprocess
import sys
import tempfile
import unittest

SCRIPT = os.path.abspath("tools/check_layers.py")

LAYERS = """# a comment
base:
fsdp: base
ddp: base
train: base fsdp ddp
tests: *
no_torch: base train/metrics
"""


def header(path, body=""):
    guard = path.upper().replace("/", "_").replace(".", "_") + "_"
    return f"#ifndef {guard}\n#define {guard}\n\n// What it is.\n\n{body}\n#endif  // {guard}\n"


GOOD = {
    "tools/layers.txt": LAYERS,
    "base/error.h": header("base/error.h", "#include <string>\n"),
    "base/error.cc": '#include "base/error.h"\n',
    "fsdp/unit.h": header("fsdp/unit.h", '#include <torch/torch.h>\n#include "base/error.h"\n'),
    "ddp/bucket.h": header("ddp/bucket.h", '#include "base/error.h"\n'),
    "train/trainer.h": header("train/trainer.h", '#include "fsdp/unit.h"\n'),
    "train/metrics.cc": '#include "base/error.h"\n',
    "tests/train/trainer_test.cc": '#include "ddp/bucket.h"\n',
    # Not read: others' code, and outputs.
    "third_party/x/x.h": "no guard\n",
    "bazel-out/x.cc": '#include "nothing.h"\n',
}


class CheckLayersTest(unittest.TestCase):
    def run_on(self, changes):
        """Exit code and output for the good tree with some files written over."""
        with tempfile.TemporaryDirectory() as root:
            for path, text in {**GOOD, **changes}.items():
                os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
                with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                    file.write(text)
            done = subprocess.run([sys.executable, "-B", SCRIPT, root], stdout=subprocess.PIPE, text=True, check=False)
            return done.returncode, done.stdout

    def expect(self, changes, *lines):
        code, output = self.run_on(changes)
        self.assertEqual(code, 1, output)
        for line in lines:
            self.assertIn(line, output)
        self.assertIn(f", {len(lines)} violations", output)

    def test_good_tree_has_no_violation(self):
        self.assertEqual(self.run_on({}), (0, "7 files of code, 0 violations\n"))

    def test_upward_include(self):
        self.expect({"base/error.cc": '#include "base/error.h"\n#include "train/metrics.cc"\n'},
                    "base/error.cc:2: base may not include train (train/metrics.cc)")

    def test_include_between_fsdp_and_ddp(self):
        self.expect({"ddp/bucket.cc": '#include "fsdp/unit.h"\n'}, "ddp/bucket.cc:1: ddp may not include fsdp")
        self.expect({"fsdp/unit.cc": '  #  include "ddp/bucket.h"\n'}, "fsdp/unit.cc:1: fsdp may not include ddp")

    def test_include_of_tests(self):
        self.expect({"tests/train/help.h": header("tests/train/help.h"),
                     "train/trainer.cc": '#include "tests/train/help.h"\n'},
                    "train/trainer.cc:1: train may not include tests")

    def test_include_that_does_not_exist(self):
        self.expect({"train/trainer.cc": '#include "train/trainr.h"\n'},
                    'train/trainer.cc:1: no file "train/trainr.h"')
        self.expect({"train/trainer.cc": '#include "trainer.h"\n'}, 'train/trainer.cc:1: no file "trainer.h"')

    def test_own_header_in_angles(self):
        self.expect({"train/trainer.cc": "#include <train/trainer.h>\n"},
                    "train/trainer.cc:1: <train/trainer.h> is ours")

    def test_folder_that_is_not_declared(self):
        self.expect({"extra/x.cc": "int x;\n"}, "extra/x.cc:1: folder extra has code but no line")
        self.expect({"x.cc": "int x;\n"}, "x.cc:1: folder x.cc has code but no line")

    def test_torch_where_there_is_none(self):
        for include in ("torch/torch.h", "ATen/ATen.h", "c10/util/Exception.h"):
            self.expect({"base/error.cc": f"#include <{include}>\n"},
                        f"base/error.cc:1: is declared free of LibTorch, but includes <{include}>")

    def test_torch_through_another_header(self):
        self.expect({"train/metrics.cc": '#include "base/error.h"\n#include "train/trainer.h"\n'},
                    "train/metrics.cc:2: is declared free of LibTorch, but includes "
                    "train/trainer.h, fsdp/unit.h, <torch/torch.h>")

    def test_guard(self):
        text = header("base/error.h")
        self.expect({"base/error.h": text.replace("#define BASE_ERROR_H_", "#define BASE_EROR_H_")},
                    "base/error.h:2: include guard: expected '#define BASE_ERROR_H_', found '#define BASE_EROR_H_'")
        self.expect({"base/error.h": text.replace("#endif  // BASE_ERROR_H_", "#endif")},
                    "base/error.h:7: include guard: expected '#endif  // BASE_ERROR_H_', found '#endif'")
        self.expect({"base/error.h": "#pragma once\n"}, "expected '#ifndef", "expected '#define", "expected '#endif")

    def test_machine_path(self):
        for folder in ("home/someone", "tmp/x", "root/x", "Users/someone"):
            self.expect({"train/trainer.cc": f'const char* path = "/{folder}/data";\n'},
                        f"train/trainer.cc:1: names a path of one machine: /{folder}")
            self.expect({"docs/page.md": f"Look into /{folder}.\n"}, "docs/page.md:1: names a path of one machine")

    def test_relative_paths_and_paths_of_every_machine_are_no_violation(self):
        text = "// src/home/x, ./tmp/x, $HOME/work/x, ~/tmp/x, /usr/share/x, /dev/null, http://x/home/y\n"
        self.assertEqual(self.run_on({"train/trainer.cc": text})[0], 0)

    def test_layers_that_are_no_order(self):
        self.expect({"tools/layers.txt": LAYERS.replace("fsdp: base\n", "fsdp: base ddp\n")},
                    "tools/layers.txt:3: fsdp may include only folders above it, not ddp")
        self.expect({"tools/layers.txt": LAYERS + "base:\n"},
                    "tools/layers.txt:8: folder base stands here a second time")
        self.expect({"tools/layers.txt": LAYERS + "no_torch: train/metrix\n"},
                    "tools/layers.txt:1: no_torch: there is no file train/metrix*")
        self.assertEqual(self.run_on({"tools/layers.txt": ""})[0], 1)

    def test_empty_tree_is_not_taken_for_a_good_one(self):
        with tempfile.TemporaryDirectory() as root:
            done = subprocess.run([sys.executable, "-B", SCRIPT, root], stdout=subprocess.PIPE, text=True, check=False)
        self.assertEqual(done.returncode, 1)


if __name__ == "__main__":
    unittest.main()
