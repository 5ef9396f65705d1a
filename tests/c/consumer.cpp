// SPDX-License-Identifier: Apache-2.0
//
// A C++17 program that uses libep as an application would: two ranks are threads that meet through the
// program's own all-gather, calls are queued on a stream, and handles are freed by destructors.
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ep.h"

namespace {

constexpr int kNumRanks = 2;
constexpr int64_t kHidden = 32;
constexpr int64_t kTokens = 20;
constexpr uint32_t kTopk = 3;
constexpr uint32_t kNumExperts = 6;
constexpr uint32_t kLocalExperts = kNumExperts / kNumRanks;

void fail(const std::string &what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::exit(1);
}

void require(bool holds, const char *what) {
    if (!holds) fail(std::string("does not hold: ") + what);
}
#define REQUIRE(condition) require((condition), #condition)

void check(ep_status_t status, const char *call) {
    if (status != EP_OK) fail(std::string(call) + ": " + ep_status_name(status) + ": " + ep_last_error());
}
#define CHECK(call) check((call), #call)

struct Free {
    void operator()(ep_group_t *group) const { CHECK(ep_group_destroy(group, 0)); }
    void operator()(ep_window_t *window) const { CHECK(ep_window_release(window)); }
    void operator()(ep_plan_t *plan) const { CHECK(ep_plan_destroy(plan)); }
    void operator()(ep_stream_t *stream) const { CHECK(ep_stream_destroy(stream)); }
    void operator()(void *memory) const { std::free(memory); }
};
template <typename T>
using Owned = std::unique_ptr<T, Free>;

// The program's own all-gather: every rank writes its bytes, the last one lets all of them read.
class Meeting {
public:
    int32_t gather(int rank, const void *send, void *recv, size_t bytes) {
        std::unique_lock<std::mutex> lock(mutex_);
        blocks_[rank].assign(static_cast<const char *>(send), static_cast<const char *>(send) + bytes);
        const uint64_t round = round_;
        if (++arrived_ == kNumRanks) {
            shared_.clear();
            for (const auto &block : blocks_) shared_.insert(shared_.end(), block.begin(), block.end());
            arrived_ = 0;
            round_++;
            changed_.notify_all();
        }
        changed_.wait(lock, [&] { return round_ != round; });
        if (shared_.size() != bytes * kNumRanks) return 1;
        if (bytes != 0) std::memcpy(recv, shared_.data(), shared_.size());
        return 0;
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<char> blocks_[kNumRanks];
    std::vector<char> shared_;
    int arrived_ = 0;
    uint64_t round_ = 0;
};

struct Member {
    Meeting *meeting;
    int rank;
};

extern "C" int32_t all_gather(void *ctx, const void *send, void *recv, size_t bytes) {
    const auto *member = static_cast<const Member *>(ctx);
    return member->meeting->gather(member->rank, send, recv, bytes);
}

template <typename T>
ep_tensor_t matrix(T *data, int32_t dtype, int64_t rows, int64_t cols) {
    ep_tensor_t tensor = EP_TENSOR_NONE;
    tensor.data = data;
    tensor.dtype = dtype;
    tensor.rows = rows;
    tensor.cols = cols;
    return tensor;
}

Owned<ep_group_t> make_group(Member *member) {
    ep_group_config_t config = EP_GROUP_CONFIG_INIT;
    ep_bootstrap_t bootstrap = EP_BOOTSTRAP_INIT;
    bootstrap.rank = member->rank;
    bootstrap.num_ranks = kNumRanks;
    bootstrap.all_gather = all_gather;
    bootstrap.all_gather_ctx = member;
    config.backend = EP_BACKEND_HOST;
    ep_group_t *group = nullptr;
    CHECK(ep_group_create(&config, &bootstrap, &group));
    return Owned<ep_group_t>(group);
}

// A plan in memory of the program's own. The memory is returned too, and must outlive the plan.
Owned<ep_plan_t> make_plan(ep_group_t *group, Owned<void> *memory) {
    ep_plan_config_t config = EP_PLAN_CONFIG_INIT;
    config.topk = kTopk;
    config.num_experts = kNumExperts;
    config.max_tokens = kTokens;
    config.layout = EP_LAYOUT_FLAT;
    size_t bytes = 0;
    CHECK(ep_plan_bytes(group, &config, &bytes));
    const size_t rounded = (bytes + 63) / 64 * 64;
    memory->reset(std::aligned_alloc(64, rounded));
    REQUIRE(memory->get() != nullptr);
    ep_plan_t *plan = nullptr;
    CHECK(ep_plan_create(group, &config, memory->get(), rounded, &plan));
    return Owned<ep_plan_t>(plan);
}

void ask_about(ep_group_t *group, int rank) {
    ep_group_info_t info = EP_GROUP_INFO_INIT;
    CHECK(ep_group_query(group, &info));
    REQUIRE(info.rank == rank && info.num_ranks == kNumRanks && info.backend == EP_BACKEND_HOST);
    REQUIRE(info.backend_reason[0] != '\0');
    ep_error_info_t error = EP_ERROR_INFO_INIT;
    int32_t states[kNumRanks] = {-1, -1};
    CHECK(ep_group_health(group, &error, states, kNumRanks));
    REQUIRE(error.status == EP_OK && states[0] == EP_RANK_ALIVE && states[1] == EP_RANK_ALIVE);
}

// Token t of a rank wants experts (t + k) % 6 with weights 1, 2, 4; expert e multiplies by e + 1. All
// numbers are small integers, so that the result is exact in fp32, whatever the order.
struct Batch {
    std::vector<float> tokens = std::vector<float>(kTokens * kHidden);
    std::vector<int32_t> experts = std::vector<int32_t>(kTokens * kTopk);
    std::vector<float> weights = std::vector<float>(kTokens * kTopk);
    std::vector<float> combined = std::vector<float>(kTokens * kHidden, -1.0f);

    explicit Batch(int rank) {
        for (int64_t i = 0; i < kTokens * kHidden; i++) tokens[i] = static_cast<float>((i * 7 + rank) % 16);
        for (int64_t i = 0; i < kTokens * kTopk; i++) {
            const int64_t token = i / kTopk, slot = i % kTopk;
            experts[i] = static_cast<int32_t>((token + slot) % kNumExperts);
            weights[i] = static_cast<float>(1 << slot);
        }
    }

    void verify() const {
        for (int64_t t = 0; t < kTokens; t++) {
            float factor = 0;
            for (uint32_t k = 0; k < kTopk; k++)
                factor += weights[t * kTopk + k] * static_cast<float>(experts[t * kTopk + k] + 1);
            for (int64_t c = 0; c < kHidden; c++)
                REQUIRE(combined[t * kHidden + c] == factor * tokens[t * kHidden + c]);
        }
    }
};

// The experts of a rank on flat rows: each row gets the weighted sum over its slots that live here.
void run_experts(int rank, float *rows, int64_t num_rows, const int32_t *experts, const float *weights) {
    for (int64_t row = 0; row < num_rows; row++) {
        float factor = 0;
        for (uint32_t k = 0; k < kTopk; k++) {
            const int32_t local = experts[row * kTopk + k];
            if (local < 0) continue;
            const uint32_t expert = static_cast<uint32_t>(rank) * kLocalExperts + static_cast<uint32_t>(local);
            factor += weights[row * kTopk + k] * static_cast<float>(expert + 1);
        }
        for (int64_t c = 0; c < kHidden; c++) rows[row * kHidden + c] *= factor;
    }
}

// Update, dispatch and combine on a stream, with rows in a window and room for the most that can come.
void run_batch(ep_plan_t *plan, ep_stream_t *stream, float *rows, int rank, int32_t reduce_order) {
    constexpr int64_t kCapacity = kNumRanks * kTokens;
    Batch batch(rank);
    std::vector<int32_t> experts(kCapacity * kTopk);
    std::vector<float> weights(kCapacity * kTopk);
    int64_t num_rows = -1, num_dropped = -1;

    const ep_tensor_t topk_idx = matrix(batch.experts.data(), EP_DTYPE_I32, kTokens, kTopk);
    ep_dispatch_inputs_t send = EP_DISPATCH_INPUTS_INIT;
    send.num_payloads = 1;
    send.payloads[0] = matrix(batch.tokens.data(), EP_DTYPE_F32, kTokens, kHidden);
    send.topk_weights = matrix(batch.weights.data(), EP_DTYPE_F32, kTokens, kTopk);
    ep_dispatch_outputs_t receive = EP_DISPATCH_OUTPUTS_INIT;
    receive.num_payloads = 1;
    receive.payloads[0] = matrix(rows, EP_DTYPE_F32, kCapacity, kHidden);
    receive.topk_idx = matrix(experts.data(), EP_DTYPE_I32, kCapacity, kTopk);
    receive.topk_weights = matrix(weights.data(), EP_DTYPE_F32, kCapacity, kTopk);
    receive.num_rows = &num_rows;
    receive.num_dropped = &num_dropped;
    CHECK(ep_plan_update(plan, &topk_idx, nullptr, stream));
    CHECK(ep_dispatch(plan, &send, &receive, nullptr, stream));
    CHECK(ep_stream_synchronize(stream, 0));
    REQUIRE(num_rows >= 0 && num_rows <= kCapacity && num_dropped == 0);

    run_experts(rank, rows, num_rows, experts.data(), weights.data());

    ep_combine_inputs_t give = EP_COMBINE_INPUTS_INIT;
    give.rows = receive.payloads[0];
    ep_combine_outputs_t get = EP_COMBINE_OUTPUTS_INIT;
    get.combined = matrix(batch.combined.data(), EP_DTYPE_F32, kTokens, kHidden);
    ep_options_t options = EP_OPTIONS_INIT;
    options.reduce_order = reduce_order;
    CHECK(ep_combine(plan, &give, &get, &options, stream));
    CHECK(ep_stream_synchronize(stream, 0));
    batch.verify();
}

void run_rank(Member member) {
    Owned<ep_group_t> group = make_group(&member);
    ask_about(group.get(), member.rank);

    ep_stream_t *made = nullptr;
    CHECK(ep_stream_create(&made));
    Owned<ep_stream_t> stream(made);
    ep_window_t *allocated = nullptr;
    CHECK(ep_window_allocate(group.get(), kNumRanks * kTokens * kHidden * sizeof(float), &allocated));
    Owned<ep_window_t> window(allocated);
    void *rows = nullptr;
    size_t bytes = 0;
    CHECK(ep_window_data(window.get(), &rows, &bytes));
    REQUIRE(bytes == kNumRanks * kTokens * kHidden * sizeof(float));

    Owned<void> memory;
    Owned<ep_plan_t> plan = make_plan(group.get(), &memory);
    // A mistake first: it is refused, said in words, and does no harm.
    ep_counts_t counts = EP_COUNTS_INIT;
    REQUIRE(ep_plan_counts(plan.get(), 0, &counts) == EP_ERR_INVALID_STATE);
    REQUIRE(std::strstr(ep_last_error(), "ep_plan_counts") != nullptr);
    for (const int32_t order : {EP_REDUCE_DEFAULT, EP_REDUCE_RANK, EP_REDUCE_NODE_RANK})
        run_batch(plan.get(), stream.get(), static_cast<float *>(rows), member.rank, order);

    ep_peer_stats_t stats[kNumRanks];
    CHECK(ep_group_stats(group.get(), stats, kNumRanks));
    REQUIRE(stats[1 - member.rank].rows_sent > 0 && stats[1 - member.rank].bytes_combined > 0);
}

} // namespace

int main() {
    REQUIRE(ep_version() == EP_VERSION_NUMBER);
    Meeting meeting;
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kNumRanks; rank++) ranks.emplace_back(run_rank, Member{&meeting, rank});
    for (std::thread &rank : ranks) rank.join();
    std::puts("ok");
    return 0;
}
