// The variants that this processor supports, and the number of rows they take.

#include "dense/products.hpp"
#include "dense/vnni.hpp"

#if defined(HAS_DOT_PRODUCTS)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace lowtide;

namespace {

#if defined(HAS_DOT_PRODUCTS)

bool has_avx512_bf16() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1;
}

// AMX registers are 8 KiB, which Linux saves for a process only on request.
bool has_amx() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned BF16 = 1u << 22, TILES = 1u << 24;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & BF16) == 0 || (d & TILES) == 0)
        return false;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

bool has_int8_tiles() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 25 & 1;
}

#endif

}  // namespace

extern "C" {

// The best variant of this processor; all lower ones run on it, too.
int lowtide_best_variant() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return PORTABLE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw")) return WITH_AVX2;
#if defined(HAS_DOT_PRODUCTS)
    if (has_avx512_bf16()) return has_amx() ? WITH_AMX : WITH_AVX512_BF16;
#endif
    return WITH_AVX512;
#else
    return PORTABLE;
#endif
}

// Returns whether the processor has AVX-VNNI, that is VNNI without AVX-512.
int lowtide_has_avx_vnni() {
#if defined(HAS_DOT_PRODUCTS)
    unsigned a = 0, b = 0, c = 0, d = 0;
    return static_cast<int>(__get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1);
#else
    return 0;
#endif
}

// The best `Int8Variant`, for products of int8 rows.
int lowtide_best_int8() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return INT8_PLAIN;
#ifdef HAS_VNNI
    // A processor with AVX2 has F16C, which some compilers cannot detect.
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni")) {
#if defined(HAS_DOT_PRODUCTS)
        if (lowtide_best_variant() == WITH_AMX && has_int8_tiles()) return INT8_AMX;
#endif
        return INT8_VNNI;
    }
#endif
    return lowtide_has_avx_vnni() ? INT8_AVX_VNNI : INT8_AVX2;
#else
    return INT8_PLAIN;
#endif
}

// The best variant for products of a few rows with q8 and q4.
int lowtide_best_own() {
    const int best = lowtide_best_variant();
#if defined(HAS_DOT_PRODUCTS)
    const bool has_all =
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi");
    if (has_all) return best;
#endif
    return std::min(best, static_cast<int>(WITH_AVX512));
}

long lowtide_max_rows(int variant) {
    return variant >= WITH_AVX512_BF16 ? MOST_ROWS_OF_DOTS : MOST_ROWS;
}

long lowtide_max_own_rows(int variant) {
    return variant >= WITH_AVX512_BF16 ? MOST_ROWS_OF_DOTS : MOST_OWN_ROWS;
}

}
