// Whole layers in one call and in several, whatever their matrices are stored in.

#include "layers.hpp"

namespace driver {
namespace {

// The residency of a layer whose experts are all in their slots.
Ids owners(const OwnLayer& own) {
    Ids out(own.slot_of.size());
    for (std::size_t expert = 0; expert < out.size(); ++expert)
        out[own.slot_of[expert]] = long(expert);
    return out;
}

// In one call as in several, by some threads as by one.
void run(const Library& kernels, int variant, const Kind& kind, const Sizes& sizes,
         const Form& form, long num_rows) {
    OwnLayer own(kind, sizes, form);
    OwnResidency all(1, sizes.num_experts, form.has_experts ? owners(own) : Ids());
    Residency* residency = form.has_experts ? &all.residency : nullptr;
    const Run run(kernels);
    const Parts parts(kernels);
    const Numbers x = numbers(num_rows * sizes.hidden);
    const Numbers turns = numbers(num_rows * sizes.head_dim / 2);
    Numbers first;
    for (int num_threads : THREADS) {
        OwnPass at_once(sizes, variant, num_threads, x, turns);
        const Turn turn = {&own.layer, &at_once.pass, 0};
        own.forget_keys();
        expect(run.advance({turn}, residency) == DONE, "a layer that is done", variant, num_rows);
        if (num_threads == 1) first = at_once.x();
        expect(at_once.x() == first, "bits of a layer by threads", variant, num_rows, num_threads);

        OwnPass apart(sizes, variant, num_threads, x, turns);
        own.forget_keys();
        const Ids experts = parts.run(own, apart.pass);
        expect(apart.x() == first, "bits of a layer in parts", variant, num_rows, num_threads);
        OwnPass routed(sizes, variant, num_threads, x, turns);
        own.forget_keys();
        parts.run(own, routed.pass, residency);
        expect(routed.x() == first, "bits of experts behind a router", variant, num_rows);
        if (form.has_experts)
            expect(all.residency.num_hits == 2 * long(distinct(experts).size()), "experts that were hit",
                   all.residency.num_hits, num_rows, sizes.num_experts);

        // The same layer twice, over the keys of the last time.
        expect(run.advance({turn, turn}, residency) == DONE, "two layers that are done", variant);
        for (int time = 0; time < 2; ++time) parts.run(own, apart.pass);
        expect(apart.x() == at_once.x(), "bits of two layers", variant, num_rows, num_threads);
        expect(all.residency.num_misses == 0, "experts that are not there", variant, num_rows);
        all.residency.num_hits = 0;
    }
    for (bf16 each : first)
        expect(std::isfinite(lowtide::widen(each)), "a layer's numbers", variant, num_rows);
}

}  // namespace

void check_layers(const Library& kernels) {
    auto* layout =
        kernels.function<const char*(const char*, long, const char**, long*)>("lowtide_layout");
    const char* type = nullptr;
    long place[3] = {};
    expect(layout("Layer", 5, &type, place) == std::string("hidden"), "a struct's last");
    expect(type == std::string("long") && place[1] == 8 && place[2] == 0, "what a field is");
    expect(place[0] == long(offsetof(Layer, hidden)), "where a field is");
    expect(layout("GroupedAttention", 1, &type, place) == std::string("projections"), "an array");
    expect(type == std::string("Matrix") && place[2] == 3, "what an array has");
    expect(!layout("Layer", 6, &type, place) && !layout("None", 0, &type, place),
           "what no struct has");
    const int best = kernels.function<int()>("lowtide_best_variant")();
    for (int variant = 0; variant <= best; ++variant)
        for (const Kind& kind : {plain_kind(kernels, variant), few_bits_kind(kernels)})
            for (const Sizes& sizes : SIZES)
                for (const Form& form : FORMS)
                    for (long num_rows : {1, 2, 7})
                        run(kernels, variant, kind, sizes, form, num_rows);
}

}  // namespace driver
