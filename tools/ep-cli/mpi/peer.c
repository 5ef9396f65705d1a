/* The MPI peer of `ep bench`: the same exchange, written as a careful user of MPI would write it.
 *
 *   dispatch  one packing pass over the tokens, then MPI_Alltoallv straight into the final flat layout:
 *             each payload, the local ids and the weights
 *   combine   MPI_Alltoallv of the experts' rows back to the owners, then our own reduction
 *
 * What helps MPI is done: all buffers are kept, touched and aligned to cache lines; destinations, counts
 * and displacements are worked out before the clock starts (with --with-plan, ours are not either); rows
 * for the rank itself are packed to where they stay; rows are copied by our copy, past the caches or not,
 * whichever a trial found faster; one datatype is one row, so that no count overflows.
 *
 * usage: peer DIR OP WITH_PLAN TOKENS TOPK EXPERTS ROUTINGS SEED DTYPE:COLS:ELEMENT_BYTES...
 *
 * Commands come over the socket DIR/socket; each rank opens it and says its number. */
#define _GNU_SOURCE
#include <mpi.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

/* tools/ep-peer */
int32_t epx_reduce(int32_t dtype, uint8_t *out, size_t cols, const uint8_t *const *rows, size_t count);
void epx_copy(uint8_t *to, const uint8_t *from, size_t bytes, int32_t streaming);
void epx_fence(void);
void epx_fill_row(uint8_t *row, size_t bytes, int32_t dtype, const uint64_t *name, size_t parts);
uint64_t epx_checksum(uint64_t state, const uint8_t *data, size_t bytes);

enum { MAX_PAYLOADS = 4, TRIAL_CALLS = 5 };
/* What a row's contents are named after, as in bench/rank.rs. */
enum { INPUT = 1, EXPERT = 2 };

typedef struct {
    int32_t dtype;
    size_t cols, bytes;  /* of a row */
    MPI_Datatype row;    /* one row */
    uint8_t *input;      /* [tokens] */
    uint8_t *send;       /* packed rows for the others; combine: what came back */
    uint8_t *rows;       /* [capacity]: the final layout */
} payload_t;

static struct {
    int rank, ranks;
    const char *dir;
    int is_combine, with_plan;
    size_t tokens, topk, experts, routings;
    uint64_t seed;
    int num_payloads;
    payload_t payload[MAX_PAYLOADS];
    int *owner, *first_expert; /* of each expert; of each rank, and the end */
    int32_t **ids;             /* [routing][tokens * topk] */
    float **weights;
    int32_t *send_ids, *out_ids;
    float *send_weights, *out_weights;
    MPI_Datatype ids_row;
    uint8_t *combined;
    /* The routing in use: the ranks of each token, ascending, and how rows lie. The rank's own rows are
     * counted in own_rows only. */
    int *dest, *dest_end;
    int *send_count, *send_at, *recv_count, *recv_at, *cursor;
    int own_rows;
    size_t num_rows;
    int streaming;
    FILE *commands, *answers;
} g;

static void fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "MPI peer, rank %d: ", g.rank);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Memory that starts on a cache line and that the system has handed out. */
static void *allocate(size_t bytes)
{
    size_t rounded = (bytes + 63) / 64 * 64;
    void *memory = aligned_alloc(64, rounded ? rounded : 64);
    if (memory == NULL) {
        fail("no memory for %zu bytes", bytes);
    }
    memset(memory, 1, rounded);
    return memory;
}

static void *read_file(const char *what, size_t routing, size_t bytes)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s.%zu.%d", g.dir, what, routing, g.rank);
    void *memory = allocate(bytes);
    FILE *file = fopen(path, "rb");
    if (file == NULL || fread(memory, 1, bytes, file) != bytes) {
        fail("%s does not have %zu bytes", path, bytes);
    }
    fclose(file);
    return memory;
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Works out where the rows of a routing go: what a plan is for us. */
static void prepare(size_t routing)
{
    const int32_t *ids = g.ids[routing];
    memset(g.send_count, 0, g.ranks * sizeof(int));
    int end = 0;
    for (size_t token = 0; token < g.tokens; token++) {
        int begin = end;
        for (size_t k = 0; k < g.topk; k++) {
            int32_t id = ids[token * g.topk + k];
            if (id < 0) {
                continue;
            }
            /* Insertion into the token's ranks, ascending and distinct. */
            int rank = g.owner[id], at = end;
            while (at > begin && g.dest[at - 1] > rank) {
                at--;
            }
            if (at > begin && g.dest[at - 1] == rank) {
                continue;
            }
            memmove(&g.dest[at + 1], &g.dest[at], (end - at) * sizeof(int));
            g.dest[at] = rank;
            end++;
            g.send_count[rank]++;
        }
        g.dest_end[token] = end;
    }
    MPI_Alltoall(g.send_count, 1, MPI_INT, g.recv_count, 1, MPI_INT, MPI_COMM_WORLD);
    g.own_rows = g.send_count[g.rank];
    g.send_count[g.rank] = 0;
    int sent = 0, received = 0;
    for (int rank = 0; rank < g.ranks; rank++) {
        g.send_at[rank] = sent;
        g.recv_at[rank] = received;
        sent += g.send_count[rank];
        received += g.recv_count[rank];
    }
    g.recv_count[g.rank] = 0;
    g.num_rows = (size_t)received;
}

static void pack_ids(const int32_t *ids, const float *weights, int rank, int32_t *to_ids, float *to_weights)
{
    int first = g.first_expert[rank], end = g.first_expert[rank + 1];
    for (size_t k = 0; k < g.topk; k++) {
        int here = ids[k] >= first && ids[k] < end;
        to_ids[k] = here ? ids[k] - first : -1;
        to_weights[k] = here ? weights[k] : 0.0f;
    }
}

static void dispatch(size_t routing)
{
    for (int rank = 0; rank < g.ranks; rank++) {
        g.cursor[rank] = rank == g.rank ? g.recv_at[rank] : g.send_at[rank];
    }
    int at = 0;
    for (size_t token = 0; token < g.tokens; token++) {
        for (; at < g.dest_end[token]; at++) {
            int rank = g.dest[at], own = rank == g.rank;
            size_t row = (size_t)g.cursor[rank]++;
            for (int p = 0; p < g.num_payloads; p++) {
                payload_t *payload = &g.payload[p];
                uint8_t *to = (own ? payload->rows : payload->send) + row * payload->bytes;
                epx_copy(to, payload->input + token * payload->bytes, payload->bytes, g.streaming);
            }
            pack_ids(g.ids[routing] + token * g.topk, g.weights[routing] + token * g.topk, rank,
                     (own ? g.out_ids : g.send_ids) + row * g.topk,
                     (own ? g.out_weights : g.send_weights) + row * g.topk);
        }
    }
    epx_fence();
    for (int p = 0; p < g.num_payloads; p++) {
        payload_t *payload = &g.payload[p];
        MPI_Alltoallv(payload->send, g.send_count, g.send_at, payload->row, payload->rows, g.recv_count,
                      g.recv_at, payload->row, MPI_COMM_WORLD);
    }
    MPI_Alltoallv(g.send_ids, g.send_count, g.send_at, g.ids_row, g.out_ids, g.recv_count, g.recv_at,
                  g.ids_row, MPI_COMM_WORLD);
    MPI_Alltoallv(g.send_weights, g.send_count, g.send_at, g.ids_row, g.out_weights, g.recv_count, g.recv_at,
                  g.ids_row, MPI_COMM_WORLD);
}

static void combine(void)
{
    payload_t *payload = &g.payload[0];
    MPI_Alltoallv(payload->rows, g.recv_count, g.recv_at, payload->row, payload->send, g.send_count,
                  g.send_at, payload->row, MPI_COMM_WORLD);
    for (int rank = 0; rank < g.ranks; rank++) {
        g.cursor[rank] = rank == g.rank ? g.recv_at[rank] : g.send_at[rank];
    }
    const uint8_t *terms[256];
    int at = 0;
    for (size_t token = 0; token < g.tokens; token++) {
        size_t count = 0;
        for (; at < g.dest_end[token]; at++) {
            int rank = g.dest[at];
            const uint8_t *rows = rank == g.rank ? payload->rows : payload->send;
            terms[count++] = rows + (size_t)g.cursor[rank]++ * payload->bytes;
        }
        epx_reduce(payload->dtype, g.combined + token * payload->bytes, payload->cols, terms, count);
    }
}

static void call(size_t routing)
{
    if (g.with_plan) {
        prepare(routing);
    }
    if (g.is_combine) {
        combine();
    } else {
        dispatch(routing);
    }
}

/* Finds out whether streaming copies are the faster ones here. */
static void choose_copy(void)
{
    uint64_t best[2] = { UINT64_MAX, UINT64_MAX };
    for (int i = 0; i < 2 * TRIAL_CALLS && !g.is_combine; i++) {
        g.streaming = i % 2;
        MPI_Barrier(MPI_COMM_WORLD);
        uint64_t start = now_ns();
        call(0);
        uint64_t mine = now_ns() - start, slowest;
        MPI_Allreduce(&mine, &slowest, 1, MPI_UINT64_T, MPI_MAX, MPI_COMM_WORLD);
        if (slowest < best[g.streaming]) {
            best[g.streaming] = slowest;
        }
    }
    g.streaming = best[1] < best[0];
}

static void fill(payload_t *payload, uint8_t *rows, size_t count, const uint64_t *name, size_t parts)
{
    uint64_t full[8];
    memcpy(full, name, parts * sizeof *name);
    for (size_t row = 0; row < count; row++) {
        full[parts] = row;
        epx_fill_row(rows + row * payload->bytes, payload->bytes, payload->dtype, full, parts + 1);
    }
}

static void set_up(void)
{
    g.owner = allocate(g.experts * sizeof(int));
    g.first_expert = allocate((g.ranks + 1) * sizeof(int));
    int expert = 0;
    for (int rank = 0; rank < g.ranks; rank++) {
        g.first_expert[rank] = expert;
        int count = (int)(g.experts / g.ranks) + ((size_t)rank < g.experts % g.ranks);
        for (int i = 0; i < count; i++) {
            g.owner[expert++] = rank;
        }
    }
    g.first_expert[g.ranks] = expert;
    int **arrays[] = { &g.send_count, &g.send_at, &g.recv_count, &g.recv_at, &g.cursor };
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        *arrays[i] = allocate(g.ranks * sizeof(int));
    }
    size_t slots = g.tokens * g.topk, capacity = 0, most_sent = 0;
    g.dest = allocate((slots + 1) * sizeof(int));
    g.dest_end = allocate(g.tokens * sizeof(int));
    g.ids = allocate(g.routings * sizeof *g.ids);
    g.weights = allocate(g.routings * sizeof *g.weights);
    for (size_t routing = 0; routing < g.routings; routing++) {
        g.ids[routing] = read_file("ids", routing, slots * sizeof(int32_t));
        g.weights[routing] = read_file("weights", routing, slots * sizeof(float));
        prepare(routing);
        size_t sent = (size_t)(g.send_at[g.ranks - 1] + g.send_count[g.ranks - 1]);
        capacity = g.num_rows > capacity ? g.num_rows : capacity;
        most_sent = sent > most_sent ? sent : most_sent;
    }
    for (int p = 0; p < g.num_payloads; p++) {
        payload_t *payload = &g.payload[p];
        MPI_Type_contiguous((int)payload->bytes, MPI_BYTE, &payload->row);
        MPI_Type_commit(&payload->row);
        payload->send = allocate(most_sent * payload->bytes);
        payload->rows = allocate(capacity * payload->bytes);
        if (g.is_combine) {
            const uint64_t name[] = { g.seed, EXPERT, (uint64_t)g.rank };
            fill(payload, payload->rows, capacity, name, 3);
            g.combined = allocate(g.tokens * payload->bytes);
        } else {
            const uint64_t name[] = { g.seed, INPUT, (uint64_t)p, (uint64_t)g.rank };
            payload->input = allocate(g.tokens * payload->bytes);
            fill(payload, payload->input, g.tokens, name, 4);
        }
    }
    MPI_Type_contiguous((int)(g.topk * 4), MPI_BYTE, &g.ids_row);
    MPI_Type_commit(&g.ids_row);
    g.send_ids = allocate(most_sent * g.topk * sizeof(int32_t));
    g.send_weights = allocate(most_sent * g.topk * sizeof(float));
    g.out_ids = allocate(capacity * g.topk * sizeof(int32_t));
    g.out_weights = allocate(capacity * g.topk * sizeof(float));
    prepare(0);
    choose_copy();
}

static void connect_to_parent(void)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    snprintf(address.sun_path, sizeof address.sun_path, "%s/socket", g.dir);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        fail("%s cannot be connected to", address.sun_path);
    }
    g.commands = fdopen(fd, "r");
    g.answers = fdopen(fd, "w");
    fprintf(g.answers, "%d\n", g.rank);
    fflush(g.answers);
}

static void run(size_t routing, size_t calls)
{
    if (!g.with_plan) {
        prepare(routing);
    }
    uint64_t *times = allocate(2 * calls * sizeof *times);
    for (size_t i = 0; i < calls; i++) {
        MPI_Barrier(MPI_COMM_WORLD);
        times[2 * i] = now_ns();
        call(g.with_plan ? (routing + i) % g.routings : routing);
        times[2 * i + 1] = now_ns();
    }
    for (size_t i = 0; i < 2 * calls; i++) {
        fprintf(g.answers, "%llu ", (unsigned long long)times[i]);
    }
    free(times);
}

static void verify(size_t routing)
{
    prepare(routing);
    call(routing);
    uint64_t sum = 0;
    if (g.is_combine) {
        sum = epx_checksum(sum, g.combined, g.tokens * g.payload[0].bytes);
    } else {
        for (int p = 0; p < g.num_payloads; p++) {
            sum = epx_checksum(sum, g.payload[p].rows, g.num_rows * g.payload[p].bytes);
        }
        sum = epx_checksum(sum, (uint8_t *)g.out_ids, g.num_rows * g.topk * 4);
        sum = epx_checksum(sum, (uint8_t *)g.out_weights, g.num_rows * g.topk * 4);
    }
    fprintf(g.answers, "%llu", (unsigned long long)sum);
}

/* Blocks in a read while others are measured, so that it takes no processor from them. */
static void serve(void)
{
    char line[256];
    while (fgets(line, sizeof line, g.commands) != NULL) {
        size_t routing, calls;
        if (sscanf(line, "run %zu %zu", &routing, &calls) == 2) {
            run(routing, calls);
        } else if (sscanf(line, "verify %zu", &routing) == 1) {
            verify(routing);
        } else {
            fail("unknown command %s", line);
        }
        fputc('\n', g.answers);
        fflush(g.answers);
    }
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &g.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &g.ranks);
    if (argc < 10 || argc > 9 + MAX_PAYLOADS) {
        fail("%d arguments", argc - 1);
    }
    g.dir = argv[1];
    g.is_combine = strcmp(argv[2], "combine") == 0;
    g.with_plan = atoi(argv[3]);
    g.tokens = strtoull(argv[4], NULL, 10);
    g.topk = strtoull(argv[5], NULL, 10);
    g.experts = strtoull(argv[6], NULL, 10);
    g.routings = strtoull(argv[7], NULL, 10);
    g.seed = strtoull(argv[8], NULL, 10);
    for (int i = 9; i < argc; i++) {
        payload_t *payload = &g.payload[g.num_payloads++];
        size_t element;
        if (sscanf(argv[i], "%d:%zu:%zu", &payload->dtype, &payload->cols, &element) != 3) {
            fail("payload %s", argv[i]);
        }
        payload->bytes = payload->cols * element;
    }
    set_up();
    connect_to_parent();
    serve();
    MPI_Finalize();
    return 0;
}
