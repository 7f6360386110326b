"""The repository @cuda: the CUDA toolkit with NCCL of this machine (CUDA_HOME, else /usr/local/cuda).

Where there is none the repository still loads, and a build of a target that needs it says what is missing.
"""

_FOUND = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "cuda",
    hdrs = glob(["include/**"]),
    includes = ["include"],
)

# A CUDA program finds NCCL and the runtime in the loader's path, or beside the torch it uses.
cc_library(
    name = "nccl",
    linkopts = ["-L{lib}", "-l:{nccl}"],
    deps = [":cuda"],
)
"""

_MISSING = """
package(default_visibility = ["//visibility:public"])

[genrule(
    name = name + "_missing",
    outs = [name + ".h"],
    cmd = "echo 'CUDA targets need the CUDA toolkit with NCCL: {reason}. Set CUDA_HOME.' >&2; exit 1",
) for name in ["cuda", "nccl"]]

[cc_library(
    name = name,
    hdrs = [name + ".h"],
) for name in ["cuda", "nccl"]]
"""

def _cuda_impl(ctx):
    home = ctx.path(ctx.os.environ.get("CUDA_HOME", "") or "/usr/local/cuda")
    reason = ""
    lib = None
    nccl = ""
    if not home.get_child("include").get_child("cuda_runtime.h").exists:
        reason = "no include/cuda_runtime.h under %s" % home
    elif not home.get_child("include").get_child("nccl.h").exists:
        reason = "no include/nccl.h under %s" % home
    else:
        for folder in ["lib64", "lib"]:
            for name in ["libnccl.so", "libnccl.so.2"]:
                if not nccl and home.get_child(folder).get_child(name).exists:
                    lib = home.get_child(folder)
                    nccl = name
        if not nccl:
            reason = "no libnccl.so under %s/lib64" % home
    if reason:
        ctx.file("BUILD", _MISSING.format(reason = reason))
        return
    ctx.symlink(home.get_child("include"), "include")
    ctx.file("BUILD", _FOUND.format(lib = lib, nccl = nccl))

cuda = repository_rule(
    implementation = _cuda_impl,
    environ = ["CUDA_HOME"],
    local = True,
)
