#ifndef BASE_SIMD_H_
#define BASE_SIMD_H_

// TESSERA_SIMD_CLONES in front of a function compiles it for several instruction sets, of which the
// loader takes the best that the processor has. For plain loops over arrays in targets built with
// -O3: the rest of the code keeps the compiler's baseline, so that one binary runs on every x86-64.

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TESSERA_SIMD_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define TESSERA_SIMD_CLONES
#endif

#endif  // BASE_SIMD_H_
