"""`drvkit.source`: where text is found, what its includes add, and what the scanner reads in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drvkit.source import KernelDecl, Source


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The two places of cuda_src: in a wheel, in a checkout. Neither exists yet."""
    places = (tmp_path / "site" / "drvkit" / "cuda_src", tmp_path / "checkout" / "cuda_src")
    monkeypatch.setattr("drvkit.source.CUDA_SRC", places)
    return places


@pytest.fixture
def root(places: tuple[Path, Path]) -> Path:
    return places[1]


def put(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def only(text: str) -> KernelDecl:
    (kernel,) = Source.from_text(text).kernels()
    return kernel


def parameters(declared: str) -> list[tuple[str, str]]:
    return [(p.type, p.name) for p in only(f"__global__ void k({declared}) {{}}").parameters]


# ---- finding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1], ids=["wheel", "checkout"])
@pytest.mark.parametrize("name", ["scale", "scale.cu"])
def test_a_name_is_found_in_cuda_src(places: tuple[Path, Path], place: int, name: str) -> None:
    path = put(places[place] / "scale.cu", "// here")
    source = Source.find(name)
    assert (source.name, source.text, source.path, source.includes) == ("scale.cu", "// here", path, ())


def test_given_places_come_before_cuda_src(root: Path, tmp_path: Path) -> None:
    put(root / "scale.cu", "// package")
    put(tmp_path / "mine" / "scale.cu", "// mine")
    assert Source.find("scale", tmp_path / "empty", tmp_path / "mine").text == "// mine"


def test_cuda_src_comes_before_the_current_directory(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(root / "scale.cu", "// package")
    put(tmp_path / "scale.cu", "// here")
    put(tmp_path / "other.cu", "// other")
    monkeypatch.chdir(tmp_path)
    assert Source.find("scale").text == "// package"
    assert Source.find("./scale").text == "// here"
    assert Source.find(Path("scale.cu")).text == "// here"
    assert Source.find("other").path == tmp_path / "other.cu"


def test_an_absolute_path_is_the_file(root: Path, tmp_path: Path) -> None:
    path = put(tmp_path / "x.cu", "// x")
    assert Source.find(os.fspath(path)) == Source.find(path)
    assert Source.find(path).name == "x.cu"


def test_a_missing_source_says_where_it_was_looked_for_and_what_there_is(root: Path, tmp_path: Path) -> None:
    put(root / "scale.cu")
    with pytest.raises(FileNotFoundError) as error:
        Source.find("sclae", tmp_path / "mine")
    for said in ("sclae.cu", str(tmp_path / "mine"), str(root), "there is scale"):
        assert said in str(error.value)


# ---- includes -----------------------------------------------------------------------------------------------------


def test_includes_are_followed_beside_the_including_file_and_in_cuda_src(root: Path, tmp_path: Path) -> None:
    put(tmp_path / "mine" / "near.cuh", '#include "dk/far.cuh"\n')
    put(root / "dk" / "far.cuh", '#include "beside.cuh"\n')
    put(root / "dk" / "beside.cuh", "// the end\n")
    source = Source.find(put(tmp_path / "mine" / "x.cu", '#include <cuda_bf16.h>\n  #  include  "near.cuh"\n'))
    assert {header.name for header in source.includes} == {"near.cuh", "dk/far.cuh", "dk/beside.cuh"}


def test_a_header_has_one_name_however_it_is_spelled(root: Path) -> None:
    put(root / "dk" / "a.cuh", '#include "b.cuh"\n')
    put(root / "dk" / "b.cuh", '#include "../dk/a.cuh"  // a cycle\n')
    source = Source.from_text('#include "dk/a.cuh"\n#include "./dk/../dk/b.cuh"\n')
    assert source.text == '#include "dk/a.cuh"\n#include "dk/b.cuh"\n'
    assert {header.name: header.text for header in source.includes} == {
        "dk/a.cuh": '#include "dk/b.cuh"\n',
        "dk/b.cuh": '#include "dk/a.cuh"  // a cycle\n',
    }


def test_two_headers_of_one_spelling_stay_two(root: Path, tmp_path: Path) -> None:
    put(root / "a.cuh", "// theirs\n")
    put(root / "dk" / "uses.cuh", '#include "../a.cuh"\n')
    put(tmp_path / "mine" / "a.cuh", "// mine\n")
    source = Source.find(put(tmp_path / "mine" / "x.cu", '#include "dk/uses.cuh"\n#include "a.cuh"\n'))
    assert {header.text for header in source.includes} >= {"// theirs\n", "// mine\n"}
    assert len({header.name for header in source.includes}) == 3


def test_a_missing_header_is_an_error_with_file_line_and_places(root: Path) -> None:
    put(root / "dk" / "a.cuh", '\n\n#include "nope.cuh"\n')
    with pytest.raises(FileNotFoundError) as error:
        Source.from_text('#include "dk/a.cuh"')
    for said in ("dk/a.cuh:3", '"nope.cuh"', str(root / "dk"), str(root)):
        assert said in str(error.value)


def test_an_include_in_a_comment_or_string_does_not_count(root: Path) -> None:
    text = '// #include "a"\n/*\n#include "b"\n*/\n// \\\n#include "c"\nauto s = R"x(\n#include "d"\n)x";\n'
    assert Source.from_text(text).text == text


def test_the_digest_covers_names_texts_and_headers(root: Path) -> None:
    text = '#include "dk/a.cuh"\n'
    header = put(root / "dk" / "a.cuh", "// 1")
    first = Source.from_text(text)
    assert len(first.digest) == 64
    assert Source.from_text(text).digest == first.digest
    assert Source.from_text(text, "other.cu").digest != first.digest
    assert Source.from_text(text + "\n").digest != first.digest
    header.write_text("// 2")
    assert Source.from_text(text).digest != first.digest


# ---- kernels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        "__global__ void",
        "void __global__",
        "static __global__ void",
        "__global__ static inline void",
        "__launch_bounds__(256, 2) __global__ void",
        "__global__ void __launch_bounds__(N * (2 + 1))",
        "__global__ __cluster_dims__(2, 1, 1) __maxnreg__(32) void",
        "[[maybe_unused]] __global__ void __attribute__((noinline))",
        "MACRO_WITHOUT_SEMICOLON(x)\n__global__ void",
        "__global__ void MY_BOUNDS(256)",
    ],
)
def test_specifiers_stand_in_any_order(head: str) -> None:
    kernel = only(f"{head} k(int n) {{}}")
    assert (kernel.name, kernel.qualified, kernel.extern_c, kernel.template) == ("k", "k", False, False)
    assert [parameter.name for parameter in kernel.parameters] == ["n"]


@pytest.mark.parametrize(
    "header",
    [
        "template <typename T>",
        "template<class T, int N = 4>",
        "template <class U = std::vector<std::pair<int, int>>, bool Q = (N > 2)>",
        "template <int N = int{4}, int M = (1 << 2)>",
        "template <template <class> class C, class... Ts> requires Good<C>",
    ],
)
def test_templates_are_told(header: str) -> None:
    kernel = only(f"{header}\n__global__ void k(T* x) {{}}")
    assert (kernel.name, kernel.template, kernel.line) == ("k", True, 2)


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ("template <typename T, class U>", ("T", "U")),
        ("template <class, int N = (4 > 2), bool>", ("", "N", "")),
        ("template <template <class, int> class A, class T = float>", ("A", "T")),
        ("template <class T, class... Ts>", ("T", "Ts...")),
        ("template <Good T, typename T::type V, unsigned>", ("T", "V", "")),
        ("template <>", ("",)),
    ],
)
def test_the_parameters_of_a_template(header: str, names: tuple[str, ...]) -> None:
    assert only(f"{header} __global__ void k(int n) {{}}").template_parameters == names
    assert only("__global__ void k(int n) {}").template_parameters == ()


@pytest.mark.parametrize(
    ("expression", "bound"),
    [
        ("k<float,4,int>", {"T": "float", "N": "4"}),
        ("ns::k< const float *, sizeof(int) >", {"T": "const float*", "N": "sizeof(int)"}),
        ("k<dk::V<float,4>,5>", {"T": "dk::V<float, 4>", "N": "5"}),
        ("k<unsigned long long>", {"T": "unsigned long long"}),
        ("k<>", {}),
        ("k", {}),
        ("_Z1kIfLi4EEvT_", {}),
    ],
)
def test_what_a_name_expression_gives_for_the_parameters(expression: str, bound: dict[str, str]) -> None:
    kernel = only("template <class T, int N, class... Ts> __global__ void k(T x, Ts... xs) {}")
    assert kernel.bound(expression) == bound


def test_extern_c_single_and_block() -> None:
    text = 'extern "C" __global__ void a() {}\nextern "C" { __global__ void b(); }\n__global__ void c() {}'
    assert [(k.name, k.extern_c) for k in Source.from_text(text).kernels()] == [("a", True), ("b", True), ("c", False)]


def test_namespaces_qualify() -> None:
    text = """
    namespace a { namespace { __global__ void k() {} }
    inline namespace v1::v2 { __global__ void k() {} struct S { void f() { if (1) {} } } s; }
    namespace [[deprecated("(old)")]] d { __global__ void k() {} } }
    __global__ void k() {}
    __global__ void a::m() {}
    """
    kernels = Source.from_text(text).kernels()
    assert [kernel.qualified for kernel in kernels] == ["a::k", "a::v1::v2::k", "a::d::k", "k", "a::m"]
    assert [kernel.name for kernel in kernels] == ["k", "k", "k", "k", "m"]


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ("", []),
        ("void", []),
        ("const float* __restrict__ x, int n", [("const float* __restrict__", "x"), ("int", "n")]),
        ("float x[], int const m[3][N[0]]", [("float[]", "x"), ("int const[3][N[0]]", "m")]),
        ("const float (*table)[4], float (*)[4]", [("const float(*)[4]", "table"), ("float(*)[4]", "")]),
        ("void (*f)(int, float), float* const x", [("void(*)(int, float)", "f"), ("float* const", "x")]),
        ("const __grid_constant__ Args args", [("const __grid_constant__ Args", "args")]),
        ("unsigned, unsigned long n", [("unsigned", ""), ("unsigned long", "n")]),
        ("ns::A, const A&, A a", [("ns::A", ""), ("const A&", ""), ("A", "a")]),
        ("A<int, B<3>> a, A<int> const", [("A<int, B<3>>", "a"), ("A<int> const", "")]),
        ("typename T::type a, typename T::type", [("typename T::type", "a"), ("typename T::type", "")]),
        ("float alpha = f(1, 2), int n = (1 < 2)", [("float", "alpha"), ("int", "n")]),
        ("[[maybe_unused]] int n, struct P p, Ts... rest", [("int", "n"), ("struct P", "p"), ("Ts...", "rest")]),
        ("float* /* out, */ x, // , int a\n int n", [("float*", "x"), ("int", "n")]),
    ],
)
def test_parameters(declared: str, expected: list[tuple[str, str]]) -> None:
    assert parameters(declared) == expected


@pytest.mark.parametrize(
    "text",
    [
        "#define NAME k\n__global__ void NAME(int n) {}",
        "#define ARGS int n, int m\n__global__ void k(ARGS) {}",
        "#define PAIR(x) int x, int y\n__global__ void k(PAIR(a)) {}",
        "__global__ void NAME(float)(int n) {}",
        "__global__ void k(bool less = a < b, int n = 3) {}",
        "template __global__ void k<float>(float*);",
        "template <> __global__ void k<float>(float*) {}",
        "#define KERNEL __global__ void k(int n)\n",
        '// __global__ void k(int n) {}\n/* __global__ void k() {} */ const char* s = "__global__ void k() {}";',
        'auto s = R"x( " __global__ void k() {} )x";',
        "struct S { friend __global__ void k(int n); };",
        "__device__ void k(int n) {}",
    ],
)
def test_what_is_not_understood_or_no_kernel_is_left_out(text: str) -> None:
    assert Source.from_text(text).kernels() == ()


def test_macros_for_restrict_are_no_names() -> None:
    kernel = only("#define RESTRICT __restrict__\n__global__ void k(float* RESTRICT x, float* RESTRICT) {}")
    assert [(p.type, p.name) for p in kernel.parameters] == [("float* RESTRICT", "x"), ("float* RESTRICT", "")]


def test_digit_separators_and_odd_literals_hide_nothing() -> None:
    text = "constexpr int big = 1'000;\nconstexpr char c = '{', d = '\"';\n#error don't\n__global__ void k(int n) {}"
    assert only(text).line == 4


def test_the_definition_wins_over_a_declaration() -> None:
    kernel = only(
        "__global__ void k(float*, int);\n\n__global__ void k(float* x, int n) {}\n__global__ void k(float*, int);"
    )
    assert (kernel.line, [p.name for p in kernel.parameters]) == (3, ["x", "n"])


def test_kernels_of_headers_come_after_with_their_file(root: Path) -> None:
    put(root / "dk" / "a.cuh", "#pragma once\n__global__ void in_header(int n) {}\n")
    kernels = Source.from_text('#include "dk/a.cuh"\n__global__ void k() {}').kernels()
    assert [(k.name, k.file, k.line) for k in kernels] == [("k", "kernel.cu", 2), ("in_header", "dk/a.cuh", 2)]


def test_lookup_takes_plain_qualified_and_instantiated_names() -> None:
    source = Source.from_text("namespace ns { template <class T> __global__ void scale(T* x, int n) {} }")
    for name in ("scale", "ns::scale", "::ns::scale", "scale<float>", "ns::scale < float, 3 >"):
        kernel = source.kernel(name)
        assert kernel, name
        assert kernel.qualified == "ns::scale"
    assert source.kernel("other") is None
    assert source.kernel("scale", 3) is None


def test_overloads_are_told_apart_by_count_or_not_at_all() -> None:
    source = Source.from_text(
        "__global__ void k(int a);\n__global__ void k(float a);\n__global__ void k(int a, int b);"
    )
    assert source.kernel("k") is None
    assert source.kernel("k", 1) is None
    two = source.kernel("k", 2)
    assert two
    assert two.line == 3
