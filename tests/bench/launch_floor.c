/* The floor of bench_launch.py: the same driver calls from C, in loops that time themselves.
 *
 * Built by the bench as a shared library. The few prototypes are declared here and looked up in libcuda.so.1, so that
 * neither cuda.h nor the toolkit is needed. Every function returns nanoseconds per call, or a failed call's
 * result code negated. The calling thread must have a current context.
 */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <stddef.h>
#include <time.h>

typedef struct { /* CUDA_KERNEL_NODE_PARAMS_v2 */
    void *func;
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_mem_bytes;
    void **kernel_params, **extra;
    void *kern, *ctx;
} KernelNodeParams;

static int (*launch_kernel)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared_mem_bytes, void *stream, void **params,
                            void **extra);
static int (*graph_create)(void **graph, unsigned flags);
static int (*graph_destroy)(void *graph);
static int (*graph_add_kernel_node)(void **node, void *graph, void *const *after, size_t count,
                                    const KernelNodeParams *params);
static int (*graph_instantiate)(void **exec, void *graph, unsigned long long flags);
static int (*exec_destroy)(void *exec);
static int (*exec_launch)(void *exec, void *stream);
static int (*exec_set_params)(void *exec, void *node, const KernelNodeParams *params);

static unsigned grid, block;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

static KernelNodeParams node_params(void *function, void **params) {
    KernelNodeParams p = {function, grid, 1, 1, block, 1, 1, 0, params, NULL, NULL, NULL};
    return p;
}

/* Look the driver's functions up; `grid` blocks of `block` threads from now on. 0, or -1 if one is missing. */
int floor_open(unsigned grid_blocks, unsigned block_threads) {
    struct {
        const char *name;
        void *to;
    } wanted[] = {
        {"cuLaunchKernel", &launch_kernel},
        {"cuGraphCreate", &graph_create},
        {"cuGraphDestroy", &graph_destroy},
        {"cuGraphAddKernelNode_v2", &graph_add_kernel_node},
        {"cuGraphInstantiateWithFlags", &graph_instantiate},
        {"cuGraphExecDestroy", &exec_destroy},
        {"cuGraphLaunch", &exec_launch},
        {"cuGraphExecKernelNodeSetParams_v2", &exec_set_params},
    };
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library)
        return -1;
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; ++i) {
        void *symbol = dlsym(library, wanted[i].name);
        if (!symbol)
            return -1;
        *(void **)wanted[i].to = symbol;
    }
    grid = grid_blocks;
    block = block_threads;
    return 0;
}

double floor_launch(void *function, void *stream, void **params, int count) {
    double begin = now();
    for (int i = 0; i < count; ++i) {
        int code = launch_kernel(function, grid, 1, 1, block, 1, 1, 0, stream, params, NULL);
        if (code)
            return -code;
    }
    return (now() - begin) / count;
}

static int add_chain(void *graph, void *function, void **params, int count) {
    void *last = NULL;
    for (int i = 0; i < count; ++i) {
        KernelNodeParams p = node_params(function, params);
        void *node;
        int code = graph_add_kernel_node(&node, graph, &last, last != NULL, &p);
        if (code)
            return code;
        last = node;
    }
    return 0;
}

/* A new graph, a chain of `count` kernel nodes, an executable: what adding (per node) and instantiating took. */
static int build(void *function, void **params, int count, double *adding, double *instantiating) {
    void *graph, *exec;
    int code = graph_create(&graph, 0);
    if (code)
        return code;
    double begin = now();
    code = add_chain(graph, function, params, count);
    *adding = (now() - begin) / count;
    if (!code && instantiating) {
        begin = now();
        code = graph_instantiate(&exec, graph, 0);
        *instantiating = now() - begin;
        if (!code)
            code = exec_destroy(exec);
    }
    int destroyed = graph_destroy(graph);
    return code ? code : destroyed;
}

double floor_add_nodes(void *function, void **params, int count) {
    double adding;
    int code = build(function, params, count, &adding, NULL);
    return code ? -code : adding;
}

double floor_instantiate(void *function, void **params, int count) {
    double adding, instantiating;
    int code = build(function, params, count, &adding, &instantiating);
    return code ? -code : instantiating;
}

double floor_launch_graph(void *exec, void *stream, int count) {
    double begin = now();
    for (int i = 0; i < count; ++i) {
        int code = exec_launch(exec, stream);
        if (code)
            return -code;
    }
    return (now() - begin) / count;
}

/* Set the parameters of one node again and again, its float argument `scalar` to another value each time. */
double floor_update(void *exec, void *node, void *function, void **params, float *scalar, int count) {
    KernelNodeParams p = node_params(function, params);
    double begin = now();
    for (int i = 0; i < count; ++i) {
        *scalar = (float)(2 + i % 2);
        int code = exec_set_params(exec, node, &p);
        if (code)
            return -code;
    }
    return (now() - begin) / count;
}
