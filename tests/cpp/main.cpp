// Calls the compiled kernels as Python does, without Python: odd sizes, no rows, one expert, all
// experts, several threads, in every variant of this processor. What sanitizers are run on
// (tools/sanitize.py). Prints the functions' names, and a verdict.
//
//     driver KERNELS.so ...

#include "driver.hpp"

using namespace driver;

int main(int num_arguments, char** arguments) {
    if (num_arguments < 2) {
        std::fprintf(stderr, "wanted: the paths of the libraries\n");
        return 2;
    }
    const Library kernels(arguments + 1);
    check_team(kernels);
    check_products(kernels);
    check_experts(kernels);
    check_rows(kernels);
    check_attention(kernels);
    check_router(kernels);
    check_packing(kernels);
    check_quantised(kernels);
    check_layers(kernels);
    check_reader(kernels);
    check_foresight();
    check_residency(kernels);
    check_blocks(kernels);
    check_rounded_rows(kernels);
    check_sections(kernels);
    check_buddies(kernels);
    check_delta(kernels);
    for (const std::string& name : called()) std::printf("%s\n", name.c_str());
    std::printf(num_wrong == 0 ? "all is as it should be\n" : "%ld things are wrong\n", num_wrong);
    return num_wrong == 0 ? 0 : 1;
}
