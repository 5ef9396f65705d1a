/* SPDX-License-Identifier: Apache-2.0
 *
 * One mixture-of-experts layer: gate, dispatch, experts, combine, check.
 *
 *     moe_layer [num_ranks]         starts that many processes (default 4) on this machine
 *     RANK=r WORLD_SIZE=n EP_UNIQUE_ID_FILE=path moe_layer
 *                                   is rank r of n; the path is the same for all, on a shared disk
 *
 * Read main() first, then layer(): that is what a trainer copies. Everything has fixed sizes here; a
 * trainer takes them from its model.
 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ep.h"

enum { HIDDEN = 256, NUM_EXPERTS = 16, TOPK = 4, MAX_TOKENS = 96, NUM_BATCHES = 3 };

/* Ends this rank, with the library's sentence. Its peers notice, and say so. */
static void check(ep_status_t status, const char *call)
{
    if (status == EP_OK) return;
    fprintf(stderr, "%s: %s\n    %s\n", call, ep_status_name(status), ep_last_error());
    exit(1);
}
#define CHECK(call) check((call), #call)

static void *allocate(size_t count, size_t bytes)
{
    void *memory = calloc(count > 0 ? count : 1, bytes);
    if (memory == NULL) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    return memory;
}

static ep_tensor_t matrix(void *data, int32_t dtype, int64_t rows, int64_t cols)
{
    ep_tensor_t tensor = EP_TENSOR_NONE;
    tensor.data = data;
    tensor.dtype = dtype;
    tensor.rows = rows;
    tensor.cols = cols;
    return tensor;
}

/* ---- The model: not about the library --------------------------------------------------------------- */

static float from_bf16(uint16_t value)
{
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* Rounds to nearest even; the values here are finite. */
static uint16_t to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/* A number in -1..1 that looks random. */
static float noise(uint32_t seed)
{
    seed = (seed ^ (seed >> 16)) * 0x7FEB352Du;
    seed = (seed ^ (seed >> 15)) * 0x846CA68Bu;
    return (float)(seed >> 8) / 8388608.0f - 1.0f;
}

/* The gate: a score for each expert, the TOPK best ones, and a softmax over those. */
static void gate(const uint16_t *token, int64_t *experts, float *weights)
{
    float scores[NUM_EXPERTS], sum = 0;
    for (int e = 0; e < NUM_EXPERTS; e++) {
        scores[e] = 0;
        for (int c = 0; c < HIDDEN; c++) scores[e] += from_bf16(token[c]) * noise((uint32_t)(e * HIDDEN + c));
    }
    for (int k = 0; k < TOPK; k++) {
        int best = 0;
        for (int e = 1; e < NUM_EXPERTS; e++)
            if (scores[e] > scores[best]) best = e;
        experts[k] = best;
        weights[k] = expf(scores[best]);
        sum += weights[k];
        scores[best] = -INFINITY;
    }
    for (int k = 0; k < TOPK; k++) weights[k] /= sum;
}

/* An expert: in a real model two matrix products, here a factor of its own. */
static void expert(int64_t id, const uint16_t *in, uint16_t *out)
{
    for (int c = 0; c < HIDDEN; c++) out[c] = to_bf16(from_bf16(in[c]) * (0.5f + 0.125f * (float)id));
}

/* What combine promises: the terms of a token one by one, each a fused multiply-add, rounded once. */
static int is_right(const uint16_t *token, const int64_t *experts, const float *weights, const uint16_t *got)
{
    uint16_t rows[TOPK][HIDDEN];
    for (int k = 0; k < TOPK; k++) expert(experts[k], token, rows[k]);
    for (int c = 0; c < HIDDEN; c++) {
        float sum = 0;
        for (int k = 0; k < TOPK; k++) sum = fmaf(weights[k], from_bf16(rows[k][c]), sum);
        if (got[c] != to_bf16(sum)) return 0;
    }
    return 1;
}

/* ---- The layer -------------------------------------------------------------------------------------- */

/* What lives as long as the model does. */
typedef struct model {
    ep_group_t *group;
    ep_window_t *window; /* where the rows of this rank's experts arrive */
    uint16_t *rows;      /* the window's memory: [max_rows, HIDDEN] */
    int64_t max_rows;
    ep_plan_t *plan;
    int64_t first_expert, num_local_experts;
    int rank, num_ranks;
} model_t;

static void create(model_t *model, const ep_bootstrap_t *bootstrap)
{
    ep_group_config_t config = EP_GROUP_CONFIG_INIT;
    ep_plan_config_t plan = EP_PLAN_CONFIG_INIT;
    int share, rest;
    void *memory;
    size_t bytes;

    model->rank = bootstrap->rank;
    model->num_ranks = bootstrap->num_ranks;
    CHECK(ep_group_create(&config, bootstrap, &model->group));

    /* A window is optional. With it, peers store each row where the expert reads it, and later read each
     * result where the expert left it; otherwise every row is copied once more. This one has room for
     * whatever may come: all slots of all tokens of all ranks. */
    model->max_rows = (int64_t)model->num_ranks * MAX_TOKENS * TOPK;
    CHECK(ep_window_allocate(model->group, (size_t)model->max_rows * HIDDEN * sizeof(uint16_t),
                             &model->window));
    CHECK(ep_window_data(model->window, &memory, &bytes));
    model->rows = (uint16_t *)memory;

    /* One plan serves batch after batch. The experts are spread evenly; the first ranks take the rest. */
    plan.topk = TOPK;
    plan.num_experts = NUM_EXPERTS;
    plan.max_tokens = MAX_TOKENS;
    plan.layout = EP_LAYOUT_EXPERT_MAJOR;
    CHECK(ep_plan_create(model->group, &plan, NULL, 0, &model->plan));
    share = NUM_EXPERTS / model->num_ranks;
    rest = NUM_EXPERTS % model->num_ranks;
    model->first_expert = model->rank * share + (model->rank < rest ? model->rank : rest);
    model->num_local_experts = share + (model->rank < rest ? 1 : 0);
}

static void destroy(model_t *model)
{
    CHECK(ep_plan_destroy(model->plan));
    CHECK(ep_window_release(model->window));
    CHECK(ep_group_destroy(model->group, 0));
}

/* out[t] = the sum over k of weights[t][k] * expert experts[t][k] of tokens[t]. Every rank calls this in
 * the same order, each with its own number of tokens, also when it has none. */
static void layer(model_t *model, uint16_t *tokens, int64_t num_tokens, int64_t *experts, float *weights,
                  uint16_t *out)
{
    ep_tensor_t topk_idx = matrix(experts, EP_DTYPE_I64, num_tokens, TOPK);
    ep_counts_t counts = EP_COUNTS_INIT;
    ep_dispatch_inputs_t send = EP_DISPATCH_INPUTS_INIT;
    ep_dispatch_outputs_t receive = EP_DISPATCH_OUTPUTS_INIT;
    ep_combine_inputs_t give = EP_COMBINE_INPUTS_INIT;
    ep_combine_outputs_t get = EP_COMBINE_OUTPUTS_INIT;
    int64_t rows_per_expert[NUM_EXPERTS], expert_offsets[NUM_EXPERTS + 1];

    /* Tell all ranks who sends how much to whom, and ask how much will arrive here. */
    CHECK(ep_plan_update(model->plan, &topk_idx, NULL, NULL));
    CHECK(ep_plan_counts(model->plan, 0, &counts));

    /* Rows to their experts. They arrive by expert: those of local expert i begin at expert_offsets[i]. */
    send.num_payloads = 1;
    send.payloads[0] = matrix(tokens, EP_DTYPE_BF16, num_tokens, HIDDEN);
    receive.num_payloads = 1;
    receive.payloads[0] = matrix(model->rows, EP_DTYPE_BF16, counts.num_rows, HIDDEN);
    receive.rows_per_expert = rows_per_expert;
    receive.expert_offsets = expert_offsets;
    CHECK(ep_dispatch(model->plan, &send, &receive, NULL, NULL));

    for (int64_t i = 0; i < model->num_local_experts; i++) {
        uint16_t *row = model->rows + expert_offsets[i] * HIDDEN;
        for (int64_t n = 0; n < rows_per_expert[i]; n++, row += HIDDEN)
            expert(model->first_expert + i, row, row);
    }

    /* Rows back to their tokens, weighed and added up. */
    give.rows = receive.payloads[0];
    give.topk_weights = matrix(weights, EP_DTYPE_F32, num_tokens, TOPK);
    get.combined = matrix(out, EP_DTYPE_BF16, num_tokens, HIDDEN);
    CHECK(ep_combine(model->plan, &give, &get, NULL, NULL));
}

static int run_rank(const ep_bootstrap_t *bootstrap)
{
    uint16_t *tokens = (uint16_t *)allocate((size_t)MAX_TOKENS * HIDDEN, sizeof *tokens);
    uint16_t *out = (uint16_t *)allocate((size_t)MAX_TOKENS * HIDDEN, sizeof *out);
    int64_t *experts = (int64_t *)allocate((size_t)MAX_TOKENS * TOPK, sizeof *experts);
    float *weights = (float *)allocate((size_t)MAX_TOKENS * TOPK, sizeof *weights);
    model_t model;
    int wrong = 0;

    create(&model, bootstrap);
    for (int batch = 0; batch < NUM_BATCHES; batch++) {
        /* Ranks need not have the same number of tokens, and may have none. */
        int64_t num_tokens = (model.rank * 37 + batch * 61) % (MAX_TOKENS + 1);
        for (int64_t i = 0; i < num_tokens * HIDDEN; i++)
            tokens[i] = to_bf16(noise((uint32_t)((batch * 1000 + model.rank) * 1000000 + i)));
        for (int64_t t = 0; t < num_tokens; t++)
            gate(tokens + t * HIDDEN, experts + t * TOPK, weights + t * TOPK);

        layer(&model, tokens, num_tokens, experts, weights, out);

        for (int64_t t = 0; t < num_tokens; t++)
            wrong += !is_right(tokens + t * HIDDEN, experts + t * TOPK, weights + t * TOPK, out + t * HIDDEN);
        printf("rank %d of %d, batch %d: %d tokens, %d wrong\n", model.rank, model.num_ranks, batch,
               (int)num_tokens, wrong);
    }
    destroy(&model);
    free(weights);
    free(experts);
    free(out);
    free(tokens);
    return wrong == 0 ? 0 : 1;
}

/* ---- Starting the ranks ----------------------------------------------------------------------------- */

/* One process a rank; they meet through a file. */
static int run_all(int num_ranks)
{
    char file[64];
    int failed = 0;

    if (num_ranks < 1) {
        fprintf(stderr, "usage: moe_layer [num_ranks]\n");
        return 2;
    }
    snprintf(file, sizeof file, "/tmp/moe_layer.%ld", (long)getpid());
    for (int rank = 0; rank < num_ranks; rank++) {
        pid_t pid = fork();
        if (pid == 0) {
            ep_bootstrap_t bootstrap = EP_BOOTSTRAP_INIT;
            bootstrap.rank = rank;
            bootstrap.num_ranks = num_ranks;
            bootstrap.file = file;
            exit(run_rank(&bootstrap));
        }
        if (pid < 0) failed++; /* the ranks that started give up at the bootstrap's deadline */
    }
    for (int status; wait(&status) > 0;)
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) failed++;
    unlink(file);
    printf("%s: %d ranks, %d failed\n", failed == 0 ? "ok" : "FAILED", num_ranks, failed);
    return failed == 0 ? 0 : 1;
}

int main(int argc, char **argv)
{
    const char *rank = getenv("RANK"), *num_ranks = getenv("WORLD_SIZE"), *file = getenv("EP_UNIQUE_ID_FILE");
    if (rank != NULL && num_ranks != NULL && file != NULL) {
        ep_bootstrap_t bootstrap = EP_BOOTSTRAP_INIT;
        bootstrap.rank = atoi(rank);
        bootstrap.num_ranks = atoi(num_ranks);
        bootstrap.file = file;
        return run_rank(&bootstrap);
    }
    return run_all(argc > 1 ? atoi(argv[1]) : 4);
}
