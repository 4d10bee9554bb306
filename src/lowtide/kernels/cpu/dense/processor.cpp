// The variants that this processor supports, and the number of rows they take.

#include "dense/products.hpp"
#include "dense/vnni.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace lowtide;

namespace {

#if defined(__x86_64__)

// What cpuid says, by leaf and part: zeros where the processor has no such leaf. The instruction
// itself is asked, since __builtin_cpu_supports reads a table of the compiler's runtime library,
// which stays empty where another toolchain has linked.
struct Answer {
    unsigned a = 0, b = 0, c = 0, d = 0;

    Answer(unsigned leaf, unsigned part) { __get_cpuid_count(leaf, part, &a, &b, &c, &d); }
};

bool has(unsigned answer, int bit) { return answer >> bit & 1; }

// Whether the system saves all of these registers, a mask of XCR0, when it changes threads.
bool saves(unsigned wanted) {
    if (!has(Answer(1, 0).c, 27)) return false;  // without OSXSAVE there is no xgetbv
    unsigned low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & wanted) == wanted;
}

bool has_avx2() {
    constexpr unsigned UPPER_HALVES = 0x6;
    const unsigned first = Answer(1, 0).c;
    const bool has_fma = has(first, 12), has_f16c = has(first, 29);
    return has_fma && has_f16c && has(Answer(7, 0).b, 5) && saves(UPPER_HALVES);
}

bool has_avx512() {
    constexpr unsigned ZMM = 0xe6;
    const unsigned found = Answer(7, 0).b;
    const bool has_f = has(found, 16), has_bw = has(found, 30);
    return has_avx2() && has_f && has_bw && saves(ZMM);
}

bool has_avx512_vl() { return has_avx512() && has(Answer(7, 0).b, 31); }

#if defined(HAS_DOT_PRODUCTS)

bool has_avx512_bf16() { return has_avx512() && has(Answer(7, 1).a, 5); }

// AMX registers are 8 KiB, which Linux saves for a process only on request.
bool has_amx() {
    const unsigned found = Answer(7, 0).d;
    const bool has_tiles = has(found, 24), has_bf16 = has(found, 22);
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return has_avx512_bf16() && has_tiles && has_bf16 &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

bool has_int8_tiles() { return has(Answer(7, 0).d, 25); }

#endif

#endif

}  // namespace

extern "C" {

// The best variant of this processor; all lower ones run on it, too.
int lowtide_best_variant() {
#if defined(__x86_64__)
    if (!has_avx2()) return PORTABLE;
    if (!has_avx512()) return WITH_AVX2;
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
    return has_avx2() && has(Answer(7, 1).a, 4);
#else
    return 0;
#endif
}

// The best `Int8Variant`, for products of int8 rows.
int lowtide_best_int8() {
#if defined(__x86_64__)
    if (!has_avx2()) return INT8_PLAIN;
#ifdef HAS_VNNI
    if (has_avx512_vl() && has(Answer(7, 0).c, 11)) {
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

// Returns whether the processor has AVX512-VBMI, and all that products with it use.
int lowtide_has_vbmi() {
#if defined(HAS_DOT_PRODUCTS)
    return has_avx512_vl() && has(Answer(7, 0).c, 1);
#else
    return 0;
#endif
}

// The best variant for products of a few rows with q8 and q4.
int lowtide_best_own() {
    const int best = lowtide_best_variant();
    if (lowtide_has_vbmi() != 0) return best;
    return std::min(best, static_cast<int>(WITH_AVX512));
}

long lowtide_max_rows(int variant) {
    return variant >= WITH_AVX512_BF16 ? MOST_ROWS_OF_DOTS : MOST_ROWS;
}

long lowtide_max_own_rows(int variant) {
    return variant >= WITH_AVX512_BF16 ? MOST_ROWS_OF_DOTS : MOST_OWN_ROWS;
}

}
