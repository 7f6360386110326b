"""The one place for compiler flags of Tessera's own code."""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library", "cc_test")

COPTS = [
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wno-unused-parameter",
    "-Werror",
]

def tessera_library(name, copts = [], **kwargs):
    cc_library(name = name, copts = COPTS + copts, **kwargs)

def tessera_binary(name, copts = [], **kwargs):
    cc_binary(name = name, copts = COPTS + copts, **kwargs)

def tessera_test(name, copts = [], deps = [], size = "small", **kwargs):
    """A GoogleTest; every test gets gtest and the harness's main function."""
    cc_test(
        name = name,
        size = size,
        copts = COPTS + copts,
        deps = deps + ["//third_party/system:gtest", "//tests/harness:main"],
        **kwargs
    )
