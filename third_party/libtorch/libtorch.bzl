"""The repository @libtorch: LibTorch's headers and libraries.

By default they come from PyPI (requirements.txt beside this file, checked by digest; about 530 MB once).
With the environment variable TESSERA_LIBTORCH they come from a LibTorch that is there already: the unpacked
libtorch archive, or the `torch` folder of a pip installation (a folder that holds include/ and lib/).
"""

def _from_folder(ctx, folder):
    root = ctx.path(folder)
    if not root.get_child("include").exists or not root.get_child("lib").exists:
        fail("TESSERA_LIBTORCH=%s: expected a folder with include/ and lib/ (an unpacked libtorch, or site-packages/torch)" % folder)
    ctx.symlink(root, "torch")
    nvidia = root.dirname.get_child("nvidia")
    if nvidia.exists:
        ctx.symlink(nvidia, "nvidia")

def _from_pypi(ctx):
    python = ctx.which("python3")
    if not python:
        fail("python3 with pip is needed to fetch LibTorch; or set TESSERA_LIBTORCH to a LibTorch that is there already")
    requirements = ctx.path(Label("//third_party/libtorch:requirements.txt"))
    ctx.report_progress("fetching LibTorch (530 MB)")
    platforms = ["manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_25_x86_64", "manylinux_2_28_x86_64"]
    result = ctx.execute(
        [python, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"] +
        ["--only-binary=:all:", "--python-version=3.11", "--implementation=cp", "--abi=cp311", "--abi=none"] +
        ["--platform=" + p for p in platforms] +
        ["--dest", "wheels", "-r", requirements],
        timeout = 1800,
    )
    if result.return_code != 0:
        fail("pip could not fetch LibTorch (set TESSERA_LIBTORCH to use one that is there already):\n" + result.stderr)
    script = "import glob, zipfile\n" + \
             "keep = ('torch/include/', 'torch/lib/', 'nvidia/')\n" + \
             "for wheel in glob.glob('wheels/*.whl'):\n" + \
             "    with zipfile.ZipFile(wheel) as z:\n" + \
             "        z.extractall('.', [n for n in z.namelist() if n.startswith(keep)])\n"
    result = ctx.execute([python, "-c", script], timeout = 1800)
    if result.return_code != 0:
        fail("could not unpack LibTorch's wheels:\n" + result.stderr)
    ctx.delete("wheels")

def _libtorch_impl(ctx):
    folder = ctx.os.environ.get("TESSERA_LIBTORCH", "")
    if folder:
        _from_folder(ctx, folder)
    else:
        _from_pypi(ctx)
    ctx.symlink(Label("//third_party/libtorch:libtorch.BUILD"), "BUILD")

libtorch = repository_rule(
    implementation = _libtorch_impl,
    environ = ["TESSERA_LIBTORCH"],
)
