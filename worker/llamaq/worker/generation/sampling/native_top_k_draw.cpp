// Draws a token from the logits of a vocabulary, as `TopKDraw` in `top_k_draw.py` does, in less time. `TopKDraw` calls this
// module if the worker is compiled.
//
// Both draw the same token: they call the same `exp`, and add the same doubles in the same order.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <new>
#include <numeric>
#include <vector>

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr Py_ssize_t COLUMNS = 64, ROWS = 64, PANEL = COLUMNS * ROWS;  // the compiler keeps 64 maxima in registers

struct Candidate {
    float logit;
    Py_ssize_t token;
};

bool is_before(const Candidate& one, const Candidate& other) {
    return one.logit > other.logit || (one.logit == other.logit && one.token < other.token);
}

bool has_smaller_token(const Candidate& one, const Candidate& other) { return one.token < other.token; }

// Write the maximum of each column of a panel, whose rows follow each other. Returns whether a logit is NaN.
bool find_maxima(const float* panel, float* maxima) {
    int is_nan[COLUMNS] = {};
    std::fill_n(maxima, COLUMNS, -INF);
    for (Py_ssize_t row = 0; row < ROWS; row++)
        for (Py_ssize_t column = 0; column < COLUMNS; column++) {
            const float logit = panel[row * COLUMNS + column];
            maxima[column] = logit > maxima[column] ? logit : maxima[column];
            is_nan[column] |= logit != logit;
        }
    return std::any_of(is_nan, is_nan + COLUMNS, [](int any) { return any; });
}

// Return the `k` candidates with the largest logits, in descending order, without those whose logit is minus infinity.
// Returns nothing if a logit is NaN.
//
// `k` columns have maxima that are at least the k-th largest one. So the columns with smaller maxima have none of the `k`
// largest logits, and are not read again.
std::vector<Candidate> find_largest(const float* logits, Py_ssize_t n_logits, Py_ssize_t k) {
    const Py_ssize_t n_panels = n_logits / PANEL, n_in_panels = n_panels * PANEL;
    std::vector<float> maxima(n_panels * COLUMNS), largest(std::min<Py_ssize_t>(k, n_panels * COLUMNS));
    bool has_nan = std::any_of(logits + n_in_panels, logits + n_logits, [](float logit) { return logit != logit; });
    for (Py_ssize_t panel = 0; panel < n_panels; panel++)
        has_nan |= find_maxima(logits + panel * PANEL, &maxima[panel * COLUMNS]);
    if (has_nan)
        return {};
    std::partial_sort_copy(maxima.begin(), maxima.end(), largest.begin(), largest.end(), std::greater<float>());
    const float least = static_cast<Py_ssize_t>(largest.size()) < k ? -INF : largest.back();

    std::vector<Candidate> candidates;
    const auto add = [&](Py_ssize_t token) {
        if (logits[token] >= least && logits[token] > -INF)
            candidates.push_back({logits[token], token});
    };
    for (size_t column = 0; column < maxima.size(); column++)
        if (maxima[column] >= least)
            for (Py_ssize_t row = 0; row < ROWS; row++)
                add(column / COLUMNS * PANEL + row * COLUMNS + column % COLUMNS);
    for (Py_ssize_t token = n_in_panels; token < n_logits; token++)
        add(token);
    const auto end = candidates.begin() + std::min<Py_ssize_t>(k, candidates.size());
    std::partial_sort(candidates.begin(), end, candidates.end(), is_before);
    candidates.erase(end, candidates.end());
    return candidates;
}

// Return how many of the sorted candidates are left after top-p and min-p.
Py_ssize_t count_kept(const std::vector<Candidate>& candidates, double top_p, double min_p, Py_ssize_t min_keep) {
    std::vector<double> weights, reached(candidates.size());
    for (const Candidate& candidate : candidates)
        weights.push_back(std::exp(double(candidate.logit) - double(candidates[0].logit)));
    Py_ssize_t n_kept = weights.size();
    if (min_p > 0)
        while (n_kept > 0 && weights[n_kept - 1] < min_p)
            n_kept--;
    if (top_p < 1) {
        std::partial_sum(weights.begin(), weights.end(), reached.begin());
        const auto first = std::lower_bound(reached.begin(), reached.end(), top_p * reached.back());
        n_kept = std::min<Py_ssize_t>(n_kept, first - reached.begin() + 1);
    }
    return std::min<Py_ssize_t>(std::max(n_kept, min_keep), weights.size());
}

// Draw one of the candidates, whose first one has the largest logit.
Py_ssize_t draw_one(std::vector<Candidate>& candidates, double temperature, double uniform) {
    const double largest = candidates[0].logit;
    std::vector<double> reached;
    double total = 0;
    std::sort(candidates.begin(), candidates.end(), has_smaller_token);
    for (const Candidate& candidate : candidates)
        reached.push_back(total += std::exp((double(candidate.logit) - largest) / temperature));
    const auto first = std::upper_bound(reached.begin(), reached.end() - 1, uniform * total);
    return candidates[first - reached.begin()].token;
}

struct Buffer {
    Py_buffer view = {};
    ~Buffer() { PyBuffer_Release(&view); }
};

PyObject* draw(PyObject*, PyObject* args) {
    Buffer logits;
    Py_ssize_t k, min_keep;
    double top_p, min_p, temperature, uniform;
    if (!PyArg_ParseTuple(args, "y*nddndd", &logits.view, &k, &top_p, &min_p, &min_keep, &temperature, &uniform))
        return nullptr;
    try {
        const Py_ssize_t n_logits = logits.view.len / Py_ssize_t(sizeof(float));
        auto candidates = find_largest(static_cast<const float*>(logits.view.buf), n_logits, k);
        if (candidates.empty() || candidates[0].logit == INF)
            Py_RETURN_NONE;
        candidates.resize(count_kept(candidates, top_p, min_p, min_keep));
        return PyLong_FromSsize_t(draw_one(candidates, temperature, uniform));
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}

PyMethodDef methods[] = {{"draw", draw, METH_VARARGS, nullptr}, {}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "native_top_k_draw", nullptr, -1, methods, {}, {}, {}, {}};

}  // namespace

PyMODINIT_FUNC PyInit_native_top_k_draw() { return PyModule_Create(&definition); }
