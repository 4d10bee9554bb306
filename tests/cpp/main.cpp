// Calls the compiled kernels as Python does, without Python: odd sizes, no rows, one expert, all
// experts, several threads, in every variant of this processor. What sanitizers are run on
// (tools/sanitize.py). Prints the functions' names, and a verdict.
//
//     driver FEW_ROWS.so QUANTISED.so GGML.so GGML_INT8.so SECTIONED.so BUDDIES.so

#include "driver.hpp"

using namespace driver;

int main(int num_arguments, char** arguments) {
    if (num_arguments != 7) {
        std::fprintf(stderr, "wanted: the paths of six libraries\n");
        return 2;
    }
    const Library few_rows(arguments[1]), quantised(arguments[2]);
    const Library ggml(arguments[3]), ggml_int8(arguments[4]), sectioned(arguments[5]);
    const Library buddies(arguments[6]);
    check_team(few_rows);
    check_products(few_rows);
    check_experts(few_rows);
    check_rows(few_rows);
    check_attention(few_rows);
    check_router(few_rows);
    check_packing(quantised);
    check_quantised(quantised, few_rows);
    check_layers(few_rows, quantised);
    check_reader(few_rows);
    check_residency(few_rows, quantised);
    check_ggml(ggml, few_rows);
    check_ggml_int8(ggml_int8, few_rows);
    check_sectioned(sectioned, few_rows);
    check_buddies(buddies);
    for (const std::string& name : called()) std::printf("%s\n", name.c_str());
    std::printf(num_wrong == 0 ? "all is as it should be\n" : "%ld things are wrong\n", num_wrong);
    return num_wrong == 0 ? 0 : 1;
}
