"""Writes the orders of torch.utils.data.DistributedSampler for distributed_sampler_test.cc.

Usage: python3 sampler_golden.py > sampler_golden.txt

Lines (numbers in decimal, hashes in hexadecimal):
  hash N WORLD SEED EPOCH SHUFFLE DROP_LAST HASH
      FNV-1a of all ranks, rank 0 first: the rank's size, then its indices, each as eight bytes,
      low byte first
  list N WORLD SEED EPOCH SHUFFLE DROP_LAST RANK : INDICES
"""

import itertools
import struct

import torch
from torch.utils.data import DistributedSampler

SIZES = [1, 2, 10, 11, 103]
WORLDS = range(1, 9)
SEEDS = [0, 1, 4, 9, 42, 2**32 + 7, 2**63 + 5]
EPOCHS = range(4)
LARGE = [(20001, 3, 7, 1), (65536, 7, 0, 2), (100003, 4, 1234567, 0)]
LISTS = [(10, 3, 0, 0), (10, 3, 0, 1), (11, 4, 42, 3), (8, 4, 42, 0), (2, 5, 0, 0), (103, 7, 9, 2)]


def ranks_of(n, world, seed, epoch, shuffle, drop_last):
    result = []
    for rank in range(world):
        sampler = DistributedSampler(range(n), world, rank, shuffle, seed, drop_last)
        sampler.set_epoch(epoch)
        result.append(list(sampler))
    return result


def fnv1a(ranks):
    value = 0xCBF29CE484222325
    for indices in ranks:
        for number in [len(indices)] + indices:
            for byte in struct.pack("<q", number):
                value = ((value ^ byte) * 0x100000001B3) % 2**64
    return value


def main():
    print("# Made by sampler_golden.py with torch", torch.__version__)
    for n, world, drop_last in itertools.product(SIZES, WORLDS, [0, 1]):
        cases = [(seed, epoch, 1) for seed in SEEDS for epoch in EPOCHS] + [(0, 0, 0), (9, 3, 0)]
        for seed, epoch, shuffle in cases:
            value = fnv1a(ranks_of(n, world, seed, epoch, bool(shuffle), bool(drop_last)))
            print("hash", n, world, seed, epoch, shuffle, drop_last, format(value, "x"))
    for n, world, seed, epoch in LARGE:
        value = fnv1a(ranks_of(n, world, seed, epoch, True, False))
        print("hash", n, world, seed, epoch, 1, 0, format(value, "x"))
    for (n, world, seed, epoch), shuffle, drop_last in itertools.product(LISTS, [1, 0], [0, 1]):
        ranks = ranks_of(n, world, seed, epoch, bool(shuffle), bool(drop_last))
        for rank, indices in enumerate(ranks):
            print("list", n, world, seed, epoch, shuffle, drop_last, rank, ":", *indices)


main()
