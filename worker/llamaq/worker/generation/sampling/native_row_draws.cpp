// Draws a token from each of several rows of logits, on several threads: see `row_draws.py`.
//
// A draw is that of `TopKDraw` in `top_k_draw.py`, in less time. Both draw the same token: they call the same `exp`, and
// add the same doubles in the same order.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <new>
#include <numeric>
#include <system_error>
#include <thread>
#include <vector>

// On x86-64, GCC compiles such a function for several processors, and the program takes the one that fits.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr uint32_t BITS_OF_INF = 0x7f800000, ALL_BUT_SIGN = 0x7fffffff;
constexpr Py_ssize_t COLUMNS = 64, ROWS = 64, PANEL = COLUMNS * ROWS;  // the compiler keeps 64 maxima in registers
constexpr Py_ssize_t NO_TOKEN = -1;

// ---- the largest logits

struct Candidate {
    float logit;
    Py_ssize_t token;
};

bool is_before(const Candidate& one, const Candidate& other) {
    return one.logit > other.logit || (one.logit == other.logit && one.token < other.token);
}

bool has_smaller_token(const Candidate& one, const Candidate& other) { return one.token < other.token; }

// Write the maximum of each column of a panel, whose rows follow each other. Returns the largest one; NAN if any logit is
// NaN: without its sign, NaN has larger bits than infinity.
FOR_EACH_PROCESSOR float find_maxima(const float* panel, float* result) {
    float maxima[COLUMNS];
    uint32_t largest_bits[COLUMNS] = {}, largest = 0;
    for (Py_ssize_t column = 0; column < COLUMNS; column++)
        maxima[column] = -INF;
    for (Py_ssize_t row = 0; row < ROWS; row++)
        for (Py_ssize_t column = 0; column < COLUMNS; column++) {
            const float logit = panel[row * COLUMNS + column];
            uint32_t bits;
            std::memcpy(&bits, &logit, sizeof bits);
            bits &= ALL_BUT_SIGN;
            maxima[column] = logit > maxima[column] ? logit : maxima[column];
            largest_bits[column] = bits > largest_bits[column] ? bits : largest_bits[column];
        }
    std::copy_n(maxima, COLUMNS, result);
    for (Py_ssize_t half = COLUMNS / 2; half; half /= 2)
        for (Py_ssize_t column = 0; column < half; column++) {
            const float other = maxima[column + half];
            maxima[column] = other > maxima[column] ? other : maxima[column];
        }
    for (const uint32_t bits : largest_bits)
        largest = bits > largest ? bits : largest;
    return largest > BITS_OF_INF ? NAN : maxima[0];
}

// Return the token with the largest logit, the first one of several. Returns NO_TOKEN if a logit is NaN, or if all are
// minus infinity.
Py_ssize_t find_best(const float* logits, Py_ssize_t n_logits) {
    float best = -INF, maxima[COLUMNS];
    Py_ssize_t start = 0, token = NO_TOKEN;
    for (; start + PANEL <= n_logits; start += PANEL) {
        const float largest = find_maxima(logits + start, maxima);
        if (std::isnan(largest))
            return NO_TOKEN;
        if (largest > best) {
            best = largest;
            token = start;  // the start of its panel, until all panels are compared
        }
    }
    if (token != NO_TOKEN)
        token = std::find(logits + token, logits + n_logits, best) - logits;
    for (; start < n_logits; start++) {
        if (std::isnan(logits[start]))
            return NO_TOKEN;
        if (logits[start] > best) {
            best = logits[start];
            token = start;
        }
    }
    return token;
}

// Return the `k` candidates with the largest logits, in descending order, without those whose logit is minus infinity.
// Returns nothing if a logit is NaN.
//
// `k` columns have maxima that are at least the k-th largest one. So the columns with smaller maxima have none of the `k`
// largest logits, and are not read again.
std::vector<Candidate> find_largest(const float* logits, Py_ssize_t n_logits, Py_ssize_t k) {
    const Py_ssize_t n_panels = n_logits / PANEL, n_in_panels = n_panels * PANEL;
    std::vector<float> maxima(n_panels * COLUMNS), largest(std::min<Py_ssize_t>(k, n_panels * COLUMNS));
    bool has_nan = std::any_of(logits + n_in_panels, logits + n_logits, [](float logit) { return std::isnan(logit); });
    for (Py_ssize_t panel = 0; panel < n_panels; panel++)
        has_nan |= std::isnan(find_maxima(logits + panel * PANEL, &maxima[panel * COLUMNS]));
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

// ---- the draw of one row

// The fields are those of `RowDraw` in `job_parts.py`.
struct Draw {
    Py_ssize_t k, min_keep;
    double top_p, min_p, temperature, uniform;
    std::vector<Py_ssize_t> masked;
};

// Return how many of the sorted candidates are left after top-p and min-p.
Py_ssize_t count_kept(const std::vector<Candidate>& candidates, const Draw& draw) {
    std::vector<double> weights, reached(candidates.size());
    for (const Candidate& candidate : candidates)
        weights.push_back(std::exp(double(candidate.logit) - double(candidates[0].logit)));
    Py_ssize_t n_kept = weights.size();
    if (draw.min_p > 0)
        while (n_kept > 0 && weights[n_kept - 1] < draw.min_p)
            n_kept--;
    if (draw.top_p < 1) {
        std::partial_sum(weights.begin(), weights.end(), reached.begin());
        const auto first = std::lower_bound(reached.begin(), reached.end(), draw.top_p * reached.back());
        n_kept = std::min<Py_ssize_t>(n_kept, first - reached.begin() + 1);
    }
    return std::min<Py_ssize_t>(std::max(n_kept, draw.min_keep), weights.size());
}

// Draw one of the candidates, whose first one has the largest logit.
Py_ssize_t draw_one(std::vector<Candidate>& candidates, const Draw& draw) {
    const double largest = candidates[0].logit;
    std::vector<double> reached;
    double total = 0;
    std::sort(candidates.begin(), candidates.end(), has_smaller_token);
    for (const Candidate& candidate : candidates)
        reached.push_back(total += std::exp((double(candidate.logit) - largest) / draw.temperature));
    const auto first = std::upper_bound(reached.begin(), reached.end() - 1, draw.uniform * total);
    return candidates[first - reached.begin()].token;
}

// Set the logits of the masked tokens to minus infinity. Returns false, and changes nothing, if one of them is NaN or
// infinity, which the mask would hide.
bool mask(float* logits, Py_ssize_t n_logits, const std::vector<Py_ssize_t>& masked) {
    for (const Py_ssize_t token : masked)
        if (token < 0 || token >= n_logits || !(logits[token] < INF))
            return false;
    for (const Py_ssize_t token : masked)
        logits[token] = -INF;
    return true;
}

// Draw a token. Returns NO_TOKEN if a logit is NaN or plus infinity, or if all are minus infinity.
Py_ssize_t draw_token(float* logits, Py_ssize_t n_logits, const Draw& draw) {
    if (!mask(logits, n_logits, draw.masked))
        return NO_TOKEN;
    if (draw.k == 1) {
        const Py_ssize_t best = find_best(logits, n_logits);
        return best == NO_TOKEN || logits[best] == INF ? NO_TOKEN : best;
    }
    std::vector<Candidate> candidates = find_largest(logits, n_logits, draw.k);
    if (candidates.empty() || candidates[0].logit == INF)
        return NO_TOKEN;
    candidates.resize(count_kept(candidates, draw));
    return draw_one(candidates, draw);
}

// ---- several threads

// Threads that help to run the tasks of a call. They sleep between two calls, and are never joined: the process ends
// with them.
class Helpers {
public:
    // Run `work` with each number below `n_tasks`, on this thread and on at most `n_helpers` others.
    void run(Py_ssize_t n_tasks, Py_ssize_t n_helpers, const std::function<void(Py_ssize_t)>& work) {
        begin(n_tasks, n_helpers, work);
        run_tasks();
        if (n_helpers > 0) {
            std::unique_lock<std::mutex> lock(mutex_);
            n_wanted_ = 0;
            idle_.wait(lock, [this] { return n_busy_ == 0; });
        }
    }

private:
    void begin(Py_ssize_t n_tasks, Py_ssize_t n_helpers, const std::function<void(Py_ssize_t)>& work) {
        const std::lock_guard<std::mutex> lock(mutex_);
        work_ = &work;
        n_tasks_ = n_tasks;
        next_ = 0;
        try {
            while (n_threads_ < n_helpers) {
                std::thread([this] { help(); }).detach();
                n_threads_++;
            }
        } catch (const std::system_error&) {  // the system has no more threads: the others do the work
        }
        n_wanted_ = n_helpers;
        if (n_helpers > 0)
            wake_.notify_all();
    }

    void help() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return n_wanted_ > 0; });
            n_wanted_--;
            n_busy_++;
            lock.unlock();
            run_tasks();
            lock.lock();
            if (--n_busy_ == 0)
                idle_.notify_one();
        }
    }

    void run_tasks() {
        for (Py_ssize_t task; (task = next_++) < n_tasks_;)
            (*work_)(task);
    }

    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    const std::function<void(Py_ssize_t)>* work_ = nullptr;
    Py_ssize_t n_tasks_ = 0, n_threads_ = 0, n_wanted_ = 0, n_busy_ = 0;
    std::atomic<Py_ssize_t> next_{0};
};

Helpers& helpers = *new Helpers;

// ---- the function for Python

struct Buffer {
    Py_buffer view = {};
    ~Buffer() { PyBuffer_Release(&view); }
};

// Read a `RowDraw`. Returns whether it is one.
bool read_draw(PyObject* object, Draw& draw) {
    PyObject* masked;
    if (!PyTuple_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "a draw is not a tuple");
        return false;
    }
    if (!PyArg_ParseTuple(object, "nddndO!d", &draw.k, &draw.top_p, &draw.min_p, &draw.min_keep, &draw.temperature,
                          &PyTuple_Type, &masked, &draw.uniform))
        return false;
    if (draw.k < 1) {
        PyErr_SetString(PyExc_ValueError, "a draw has k below 1");
        return false;
    }
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(masked); index++)
        draw.masked.push_back(PyLong_AsSsize_t(PyTuple_GET_ITEM(masked, index)));
    return !PyErr_Occurred();
}

PyObject* to_list(const std::vector<Py_ssize_t>& tokens) {
    PyObject* list = PyList_New(tokens.size());
    for (size_t row = 0; list && row < tokens.size(); row++) {
        PyObject* token = tokens[row] == NO_TOKEN ? Py_NewRef(Py_None) : PyLong_FromSsize_t(tokens[row]);
        if (!token)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, row, token);
    }
    return list;
}

PyObject* draw_rows(PyObject*, PyObject* args) {
    Buffer logits;
    PyObject* list;
    Py_ssize_t n_threads;
    if (!PyArg_ParseTuple(args, "w*O!n", &logits.view, &PyList_Type, &list, &n_threads))
        return nullptr;
    try {
        const Py_ssize_t n_rows = PyList_GET_SIZE(list);
        const Py_ssize_t n_logits = n_rows ? logits.view.len / Py_ssize_t(sizeof(float)) / n_rows : 0;
        std::vector<Draw> draws(n_rows);
        std::vector<Py_ssize_t> tokens(n_rows, NO_TOKEN), drawn;
        for (Py_ssize_t row = 0; row < n_rows; row++) {
            if (PyList_GET_ITEM(list, row) == Py_None)
                continue;
            if (!read_draw(PyList_GET_ITEM(list, row), draws[row]))
                return nullptr;
            drawn.push_back(row);
        }
        auto* all = static_cast<float*>(logits.view.buf);
        const Py_ssize_t n_tasks = drawn.size();
        helpers.run(n_tasks, std::min(n_threads, n_tasks) - 1, [&](Py_ssize_t task) {
            const Py_ssize_t row = drawn[task];
            try {
                tokens[row] = draw_token(all + row * n_logits, n_logits, draws[row]);
            } catch (const std::bad_alloc&) {  // the caller draws this row in another way
            }
        });
        return to_list(tokens);
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}

PyMethodDef methods[] = {{"draw_rows", draw_rows, METH_VARARGS, nullptr}, {}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "native_row_draws", nullptr, -1, methods, {}, {}, {}, {}};

}  // namespace

PyMODINIT_FUNC PyInit_native_row_draws() { return PyModule_Create(&definition); }
