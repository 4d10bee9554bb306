// Gated delta-nets: rows at once as one by one, in place as beside, and near what double precision
// finds.

#include "driver.hpp"
#include "operators.hpp"

namespace driver {
namespace {

using lowtide::DeltaChunk;
using lowtide::DeltaRows;
using lowtide::DeltaSpec;
using lowtide::DeltaWeights;
using lowtide::widen;

using DeltaSteps = void(int, int, const DeltaRows*, const DeltaWeights*);
using DeltaPrepare = void(int, int, const DeltaRows*, const DeltaWeights*, const DeltaChunk*);
using SiluWeigh = void(int, int, bf16*, long, const bf16*, long, long, long);
using SigmoidWeigh = void(int, int, bf16*, long, const bf16*, long, long, long, long, long);

struct State {
    Numbers tail;
    Floats matrices;

    bool operator==(const State& other) const {
        return tail == other.tail && matrices == other.matrices;
    }
};

// Inputs of some rows, and what weighs them.
struct Case {
    DeltaSpec spec;
    long num_rows;
    Numbers mixed, beta, time;
    Floats conv, decay, time_bias;
    State state;

    Case(const DeltaSpec& own, long num_rows)
        : spec(own), num_rows(num_rows), mixed(numbers(num_rows * own.channels())),
          beta(numbers(num_rows * own.value_heads)), time(numbers(num_rows * own.value_heads)),
          conv(floats(own.channels() * own.kernel)), decay(floats(own.value_heads)),
          time_bias(floats(own.value_heads)),
          state{numbers((own.kernel - 1) * own.channels()),
                floats(own.value_heads * own.key_width * own.value_width)} {
        for (float& each : decay) each = -std::abs(each);
    }

    DeltaWeights weights() const { return {spec, conv.data(), decay.data(), time_bias.data()}; }

    long out_size() const { return spec.value_heads * spec.value_width; }

    // What a chunk of all rows is made of: keys and queries, values, betas, decays; and the tail.
    std::pair<std::vector<Floats>, Numbers> prepare(DeltaPrepare* call, int variant,
                                                    int num_threads) const {
        const long pairs = spec.value_heads * num_rows;
        std::vector<Floats> made = {Floats(2 * pairs * spec.key_width),
                                    Floats(pairs * spec.value_width), Floats(pairs),
                                    Floats(pairs)};
        Numbers tail(state.tail.size());
        const DeltaWeights own = weights();
        const DeltaRows rows = {
            mixed.data(), spec.channels(), beta.data(), spec.value_heads, time.data(),
            spec.value_heads, state.tail.data(), tail.data(), nullptr, nullptr, nullptr, 0,
            num_rows,
        };
        const DeltaChunk chunk = {made[0].data(), made[1].data(), made[2].data(), made[3].data()};
        call(variant, num_threads, &rows, &own, &chunk);
        return {made, tail};
    }

    // Of `count` rows from `first` on.
    Numbers run(DeltaSteps* steps, int variant, int num_threads, long first, long count,
                const State& before, State& after) const {
        Numbers out(count * out_size());
        const DeltaWeights own = weights();
        const DeltaRows rows = {
            mixed.data() + first * spec.channels(), spec.channels(),
            beta.data() + first * spec.value_heads, spec.value_heads,
            time.data() + first * spec.value_heads, spec.value_heads,
            before.tail.data(), after.tail.data(), before.matrices.data(), after.matrices.data(),
            out.data(), out_size(), count,
        };
        steps(variant, num_threads, &rows, &own);
        return out;
    }
};

// One row's outputs, in double precision; `matrices` are advanced. window: its `kernel` rows.
std::vector<double> wanted_row(const Case& c, const std::vector<const bf16*>& window, long row,
                               std::vector<double>& matrices) {
    const long key_heads = c.spec.key_heads, value_heads = c.spec.value_heads;
    const long key_width = c.spec.key_width, value_width = c.spec.value_width;
    const long kernel = c.spec.kernel;
    std::vector<double> mixed(c.spec.channels()), out;
    for (long i = 0; i < long(mixed.size()); ++i) {
        for (long tap = 0; tap < kernel; ++tap)
            mixed[i] += double(widen(window[tap][i])) * c.conv[i * kernel + tap];
        mixed[i] /= 1 + std::exp(-mixed[i]);
    }
    const auto unit = [&](long start, double scale) {
        double squares = 1e-6;
        for (long i = 0; i < key_width; ++i) squares += mixed[start + i] * mixed[start + i];
        for (long i = 0; i < key_width; ++i) mixed[start + i] *= scale / std::sqrt(squares);
    };
    for (long head = 0; head < key_heads; ++head) {
        unit(head * key_width, 1 / std::sqrt(double(key_width)));
        unit((key_heads + head) * key_width, 1);
    }
    for (long head = 0; head < value_heads; ++head) {
        const long key_head = c.spec.is_tiled ? head % key_heads : head / (value_heads / key_heads);
        const double* query = mixed.data() + key_head * key_width;
        const double* key = query + key_heads * key_width;
        const double* value = mixed.data() + 2 * key_heads * key_width + head * value_width;
        const double time = widen(c.time[row * value_heads + head]) + double(c.time_bias[head]);
        const double growth = std::exp(c.decay[head] * std::log1p(std::exp(time)));
        const double beta = 1 / (1 + std::exp(-double(widen(c.beta[row * value_heads + head]))));
        for (long j = 0; j < value_width; ++j) {
            double seen = 0, read = 0;
            const auto at = [&](long i) -> double& {
                return matrices[(head * key_width + i) * value_width + j];
            };
            for (long i = 0; i < key_width; ++i) seen += (at(i) *= growth) * key[i];
            for (long i = 0; i < key_width; ++i)
                read += (at(i) += key[i] * beta * (value[j] - seen)) * query[i];
            out.push_back(read);
        }
    }
    return out;
}

void check_case(DeltaSteps* steps, int best, const DeltaSpec& spec, long num_rows) {
    const Case c(spec, num_rows);
    State wanted_state = c.state;
    const Numbers wanted =
        c.run(steps, 0, 1, 0, num_rows, c.state, wanted_state);
    for (int variant = 0; variant <= best; ++variant)
        for (int num_threads : THREADS) {
            State after = c.state;
            expect(c.run(steps, variant, num_threads, 0, num_rows, c.state, after) == wanted &&
                       after == wanted_state,
                   "bits of a delta-net", variant, num_threads, num_rows);
            State in_place = c.state;
            Numbers one_by_one;
            for (long row = 0; row < num_rows; ++row)
                for (bf16 each : c.run(steps, variant, num_threads, row, 1, in_place, in_place))
                    one_by_one.push_back(each);
            expect(one_by_one == wanted && in_place == wanted_state, "a delta-net's rows alone",
                   variant, num_threads, num_rows);
        }
    std::vector<double> matrices(c.state.matrices.begin(), c.state.matrices.end());
    std::vector<const bf16*> window;
    for (long i = 0; i < spec.kernel - 1; ++i)
        window.push_back(c.state.tail.data() + i * spec.channels());
    for (long row = 0; row < num_rows; ++row) {
        window.push_back(c.mixed.data() + row * spec.channels());
        const std::vector<double> out = wanted_row(c, window, row, matrices);
        for (long i = 0; i < c.out_size(); ++i)
            expect(is_near(wanted[row * c.out_size() + i], out[i], double(spec.key_width)),
                   "a delta-net's output", row, i, num_rows);
        window.erase(window.begin());
    }
    for (std::size_t i = 0; i < matrices.size(); ++i)
        expect(std::abs(wanted_state.matrices[i] - matrices[i]) < 1e-5, "a delta-net's matrix",
               long(i), num_rows);
    for (std::size_t i = 0; i < window.size(); ++i)
        expect(std::equal(window[i], window[i] + spec.channels(),
                          wanted_state.tail.data() + long(i) * spec.channels()),
               "a delta-net's tail", long(i), num_rows);
}

void check_chunk(DeltaPrepare* prepare, int best, const DeltaSpec& spec, long num_rows) {
    const Case c(spec, num_rows);
    const auto wanted = c.prepare(prepare, 0, 1);
    for (int variant = 0; variant <= best; ++variant)
        for (int num_threads : THREADS)
            expect(c.prepare(prepare, variant, num_threads) == wanted, "bits of a delta-net's chunk",
                   variant, num_threads, num_rows);
    const Floats& keys_queries = wanted.first[0];
    for (long i = 0; i < 2 * spec.value_heads * num_rows; ++i) {
        double squares = 0;
        for (long j = i * spec.key_width; j < (i + 1) * spec.key_width; ++j)
            squares += double(keys_queries[j]) * keys_queries[j];
        const bool is_key = i / num_rows % 2 == 0;
        expect(squares < (is_key ? 1 : 1.0 / spec.key_width) + 1e-5, "a chunk's keys", i, num_rows);
    }
    for (long head = 0; head < spec.value_heads; ++head) {
        double sum = 0;
        for (long row = 0; row < num_rows; ++row) {
            const long from = row * spec.value_heads + head, to = head * num_rows + row;
            const double beta = 1 / (1 + std::exp(-double(widen(c.beta[from]))));
            const double time = double(widen(c.time[from])) + double(c.time_bias[head]);
            sum += c.decay[head] * std::log1p(std::exp(time));
            expect(std::abs(wanted.first[2][to] - beta) < 1e-6, "a chunk's beta", head, row);
            expect(std::abs(wanted.first[3][to] - sum) < 1e-4, "a chunk's decay", head, row);
        }
    }
}

void weigh_by_silu(SiluWeigh* weigh, int best, long num_rows, long length) {
    const long stride = length + 3;
    const Numbers x = numbers(strided(num_rows, stride, length));
    const Numbers gates = numbers(strided(num_rows, stride, length));
    Numbers first;
    for (int variant = 0; variant <= best; ++variant)
        for (int num_threads : THREADS) {
            Numbers out = x;
            weigh(variant, num_threads, out.data(), stride, gates.data(), stride, num_rows, length);
            if (first.empty()) first = out;
            expect(out == first, "bits of weighing by silu", variant, num_rows, length);
        }
    for (long i = 0; i < long(first.size()); ++i) {
        const double gate = widen(gates[i]);
        const bool is_gap = i % stride >= length;
        const double wanted = widen(x[i]) * (is_gap ? 1 : gate / (1 + std::exp(-gate)));
        expect(is_near(first[i], wanted, 1), "weighing by silu", i, num_rows, length);
    }
}

// Heads of gates lie apart, as where queries lie between them.
void weigh_by_sigmoid(SigmoidWeigh* weigh, int best, long num_rows, long num_heads, long length) {
    const long size = num_heads * length, row = 2 * size + 1, head = 2 * length;
    const Numbers x = numbers(num_rows * size), gates = numbers(num_rows * row);
    Numbers first;
    for (int variant = 0; variant <= best; ++variant)
        for (int num_threads : THREADS) {
            Numbers out = x;
            weigh(variant, num_threads, out.data(), size, gates.data(), row, head, num_rows,
                  num_heads, length);
            if (first.empty()) first = out;
            expect(out == first, "bits of weighing by a sigmoid", variant, num_rows, length);
        }
    for (long i = 0; i < long(first.size()); ++i) {
        const double gate = widen(gates[i / size * row + i % size / length * head + i % length]);
        expect(is_near(first[i], widen(x[i]) / (1 + std::exp(-gate)), 1), "weighing by a sigmoid", i,
               num_rows, length);
    }
}

}  // namespace

void check_delta(const Library& kernels) {
    const int best = kernels.function<int()>("lowtide_best_variant")();
    auto* steps = kernels.function<DeltaSteps>("lowtide_delta_steps");
    auto* prepare = kernels.function<DeltaPrepare>("lowtide_delta_prepare");
    // Key heads, value heads, widths of keys and values, the kernel, and whether heads are tiled:
    // the last has work for several threads.
    constexpr DeltaSpec SPECS[] = {{1, 1, 1, 1, 1, 0},  {2, 4, 16, 24, 4, 0}, {2, 4, 16, 24, 4, 1},
                                   {3, 3, 17, 33, 2, 0}, {4, 8, 128, 128, 4, 1}};
    for (const DeltaSpec& spec : SPECS)
        for (long num_rows : {0, 1, 2, 3, 8}) {
            check_case(steps, best, spec, num_rows);
            check_chunk(prepare, best, spec, num_rows);
        }
    auto* weigh = kernels.function<SiluWeigh>("lowtide_silu_weigh");
    auto* weigh_heads = kernels.function<SigmoidWeigh>("lowtide_sigmoid_weigh");
    for (long num_rows : {0, 1, 3})
        for (long length : {1, 24, 300}) {
            weigh_by_silu(weigh, best, num_rows, length);
            weigh_by_sigmoid(weigh_heads, best, num_rows, 3, length);
        }
}

}  // namespace driver
