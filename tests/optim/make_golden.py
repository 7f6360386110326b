#!/usr/bin/env python3
"""Writes golden.h: what PyTorch's fused AdamW and SGD make of small inputs.

Run with PyTorch 2.11 on CPU: python3 make_golden.py > golden.h

Inputs are small fractions of powers of two, made by a formula that the test repeats, so both sides start from the
same bits. Results are written as hexadecimal floats, which lose nothing.
"""

import torch

NUMEL = 37  # a prime: whole vectors and a rest at every SIMD width
STEPS = 5
CONFIGS = [
    # name, optimizer, options
    ("kAdamW", torch.optim.AdamW, dict(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)),
    ("kSgd", torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.01)),
    ("kSgdNesterov", torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True)),
    ("kSgdPlain", torch.optim.SGD, dict(lr=0.1, weight_decay=0.01)),
]


def value(i):
    return ((i * 7) % 16 - 7.5) / 8


def grad(step, i):
    return ((i * 5 + step * 11) % 32 - 15.5) / 16


def train(make, options):
    param = torch.nn.Parameter(torch.tensor([value(i) for i in range(NUMEL)]))
    optimizer = make([param], fused=True, **options)
    for step in range(STEPS):
        param.grad = torch.tensor([grad(step, i) for i in range(NUMEL)])
        optimizer.step()
    return param.detach()


def hexfloat(number):
    return float(number).hex() + "f"


def main():
    print("#ifndef TESTS_OPTIM_GOLDEN_H_")
    print("#define TESTS_OPTIM_GOLDEN_H_")
    print()
    print("// Written by make_golden.py with PyTorch %s; do not edit." % torch.__version__.split("+")[0])
    print()
    print("namespace tessera::optim::golden {")
    print()
    for name, make, options in CONFIGS:
        numbers = [hexfloat(x) for x in train(make, options)]
        print("// torch.optim.%s(fused=True, %s)" % (
            make.__name__, ", ".join("%s=%s" % item for item in options.items())))
        print("inline constexpr float %s[] = {" % name)
        for begin in range(0, NUMEL, 4):
            print("    " + ", ".join(numbers[begin:begin + 4]) + ",")
        print("};")
        print()
    print("}  // namespace tessera::optim::golden")
    print()
    print("#endif  // TESTS_OPTIM_GOLDEN_H_")


main()
