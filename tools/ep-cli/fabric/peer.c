/* The raw peer of `ep bench fabric`: one of two processes that write to each other by libfabric and nothing else.
 *
 * A window of writes with remote CQ data is posted and drained, then the next.
 * usage: peer PROVIDER ADDRESS...
 * It says its NICs, each as ADDRESS:KEY:BASE in hexadecimal digits, and is told the other's. Then it answers
 *   send BYTES WINDOW WRITES SLEEP    when all completed, with nanoseconds
 *   take BYTES WINDOW WRITES SLEEP    when all arrived, with nanoseconds */
#include <poll.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_rma.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_NICS = 4, BATCH = 32, LINE = 4096, DEADLINE_S = 20, MAX_WINDOW = 8192 };
/* As in bench/fabric/rank.rs. */
enum { BUFFER = 16 << 20, SPINS = 200, YIELD_SPINS = 2000 };

typedef struct {
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_cq *cq;
    struct fid_av *av;
    struct fid_ep *ep;
    struct fid_mr *mr;
    int fd;
    uint64_t peer, base, key, done, taken; /* the first three name the other process's memory */
} nic_t;

static const uint64_t NS = 1000000000, FLAGS = FI_REMOTE_CQ_DATA | FI_COMPLETION | FI_DELIVERY_COMPLETE;
static nic_t nics[MAX_NICS];
static int num_nics;
static char *buffer;
#define CHECK(call) check((int)(call), #call)
static void check(int code, const char *call) {
    if (code < 0) {
        printf("failed %s: %s\n", call, fi_strerror(-code));
        exit(1);
    }
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * NS + (uint64_t)t.tv_nsec;
}

static void open_nic(nic_t *nic, const char *provider, const char *address) {
    struct fi_info *hints = fi_allocinfo(), *info;
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->fabric_attr->prov_name = strdup(provider);
    CHECK(fi_getinfo(FI_VERSION(1, 17), address, NULL, FI_SOURCE, hints, &info));
    CHECK(fi_fabric(info->fabric_attr, &nic->fabric, NULL));
    CHECK(fi_domain(nic->fabric, info, &nic->domain, NULL));
    /* The descriptor of `net` stays readable for ever: it is spun on. */
    struct fi_cq_attr cq = {.size = 8192, .format = FI_CQ_FORMAT_DATA};
    cq.wait_obj = strcmp(provider, "net") ? FI_WAIT_FD : FI_WAIT_NONE;
    if (fi_cq_open(nic->domain, &cq, &nic->cq, NULL)) {
        cq.wait_obj = FI_WAIT_NONE;
        CHECK(fi_cq_open(nic->domain, &cq, &nic->cq, NULL));
    }
    nic->fd = -1; /* It cannot be slept on. */
    if (cq.wait_obj == FI_WAIT_FD)
        CHECK(fi_control(&nic->cq->fid, FI_GETWAIT, &nic->fd));
    struct fi_av_attr av = {.type = FI_AV_TABLE};
    CHECK(fi_av_open(nic->domain, &av, &nic->av, NULL));
    CHECK(fi_endpoint(nic->domain, info, &nic->ep, NULL));
    CHECK(fi_ep_bind(nic->ep, &nic->av->fid, 0));
    CHECK(fi_ep_bind(nic->ep, &nic->cq->fid, FI_TRANSMIT | FI_RECV));
    CHECK(fi_enable(nic->ep));
    CHECK(fi_mr_reg(nic->domain, buffer, BUFFER, FI_WRITE | FI_REMOTE_WRITE, 0, 77, 0, &nic->mr, NULL));
    char name[64];
    size_t len = sizeof name;
    CHECK(fi_getname(&nic->ep->fid, name, &len));
    for (size_t i = 0; i < len; i++)
        printf("%02x", (unsigned char)name[i]);
    uint64_t base = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)buffer : 0;
    printf(":%lx:%lx ", fi_mr_key(nic->mr), base);
}

static void connect_nic(nic_t *nic, const char *told) {
    char name[64] = {0};
    unsigned byte;
    for (int i = 0; i < 64 && sscanf(told, "%2x", &byte) == 1; i++, told += 2)
        name[i] = (char)byte;
    int known = fi_av_insert(nic->av, name, 1, &nic->peer, 0, NULL);
    if (sscanf(told, ":%lx:%lx", &nic->key, &nic->base) != 2 || known != 1)
        check(-FI_EINVAL, "fi_av_insert");
}

static int look(nic_t *nic) {
    struct fi_cq_data_entry entries[BATCH];
    struct fi_cq_err_entry error = {0};
    ssize_t found = fi_cq_read(nic->cq, entries, BATCH);
    if (found == -FI_EAGAIN)
        return 0;
    if (found == -FI_EAVAIL && fi_cq_readerr(nic->cq, &error, 0) == 1)
        check(-error.err, "a write");
    CHECK(found);
    for (ssize_t i = 0; i < found; i++)
        *(entries[i].flags & FI_REMOTE_CQ_DATA ? &nic->taken : &nic->done) += 1;
    return (int)found;
}

/* Nothing was found `idle` times in a row, since about `quiet`: sleeps if it may and should. */
static void rest(uint64_t idle, int sleeps, uint64_t *quiet) {
    sleeps = sleeps && idle >= SPINS && nics[0].fd >= 0;
    if (!sleeps && idle % YIELD_SPINS)
        return;
    if (!*quiet)
        *quiet = now_ns();
    if (now_ns() - *quiet > DEADLINE_S * NS)
        check(-FI_ETIMEDOUT, "waiting");
    struct pollfd fds[MAX_NICS];
    for (int i = 0; sleeps && i < num_nics; i++) {
        struct fid *fid = &nics[i].cq->fid;
        if (fi_trywait(nics[i].fabric, &fid, 1))
            return;
        fds[i] = (struct pollfd){.fd = nics[i].fd, .events = POLLIN};
    }
    sleeps ? poll(fds, (nfds_t)num_nics, 100) : sched_yield();
}

static void post(nic_t *nic, size_t bytes, uint64_t number) {
    static struct fi_context2 contexts[MAX_WINDOW];
    size_t stride = bytes ? (bytes + 63) & ~(size_t)63 : 64;
    size_t offset = number % (BUFFER / stride) * stride;
    struct iovec iov = {buffer + offset, bytes};
    struct fi_rma_iov remote = {nic->base + offset, bytes, nic->key};
    void *desc = fi_mr_desc(nic->mr);
    void *context = &contexts[number % MAX_WINDOW];
    struct fi_msg_rma msg = {&iov, &desc, 1, nic->peer, &remote, 1, context, (uint32_t)number};
    for (ssize_t code; (code = fi_writemsg(nic->ep, &msg, FLAGS)); look(nic))
        if (code != -FI_EAGAIN)
            CHECK(code);
}

/* Waits until own writes completed, or the peer's arrived. */
static void wait_for(uint64_t wanted, int own, int sleeps) {
    uint64_t quiet = 0, idle = 0, have = 0;
    while (have < wanted) {
        int found = 0;
        have = 0;
        for (int i = 0; i < num_nics; i++) {
            found += look(&nics[i]);
            have += own ? nics[i].done : nics[i].taken;
        }
        if (found)
            idle = quiet = 0;
        else if (have < wanted)
            rest(++idle, sleeps, &quiet);
    }
}

static uint64_t run(int sends, size_t bytes, uint64_t window, uint64_t writes, int sleeps) {
    uint64_t start = now_ns();
    for (uint64_t number = 0; sends && number < writes;) {
        for (uint64_t end = number + window; number < end && number < writes; number++)
            post(&nics[number % (uint64_t)num_nics], bytes, number);
        wait_for(number, 1, sleeps);
    }
    if (!sends)
        wait_for(writes, 0, sleeps);
    for (int i = 0; i < num_nics; i++)
        nics[i].done = nics[i].taken = 0;
    return now_ns() - start;
}

int main(int argc, char **argv) {
    static char line[LINE];
    setvbuf(stdout, NULL, _IOLBF, 0);
    num_nics = argc - 2;
    if (num_nics < 1 || num_nics > MAX_NICS || posix_memalign((void **)&buffer, 64, BUFFER))
        return 2;
    memset(buffer, 1, BUFFER);
    for (int i = 0; i < num_nics; i++)
        open_nic(&nics[i], argv[1], argv[2 + i]);
    puts("");
    char *told = fgets(line, sizeof line, stdin) ? strtok(line, " \n") : NULL;
    for (int i = 0; i < num_nics; i++, told = strtok(NULL, " \n"))
        connect_nic(&nics[i], told ? told : "");
    while (fgets(line, sizeof line, stdin)) {
        uint64_t bytes, window, writes;
        int sleeps;
        char what[8];
        if (sscanf(line, "%7s %lu %lu %lu %d", what, &bytes, &window, &writes, &sleeps) != 5 || bytes > BUFFER)
            return 2;
        printf("%lu\n", run(strcmp(what, "send") == 0, bytes, window, writes, sleeps));
    }
    return 0;
}
