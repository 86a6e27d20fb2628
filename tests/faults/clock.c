/* A wall clock that a test can shift, preloaded into a process. Monotonic clocks stay as they are.
 *
 * The shift of process N, seconds as a double, is the file N in the folder $TEST_CLOCK_FOLDER: mapped, so that whoever
 * writes it moves the clock at once. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static double none;
static volatile double *shift_s = &none;

__attribute__((constructor)) static void map_shift(void) {
    const char *folder = getenv("TEST_CLOCK_FOLDER");
    char path[PATH_MAX];
    if (folder == NULL || snprintf(path, sizeof path, "%s/%d", folder, getpid()) >= (int)sizeof path) return;
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) return;
    if (ftruncate(file, sizeof(double)) == 0) {
        void *mapped = mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
        if (mapped != MAP_FAILED) shift_s = mapped;
    }
    close(file);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, now);
    if (status == 0 && id == CLOCK_REALTIME) now->tv_sec += (time_t)*shift_s;
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec exact;
    int status = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return status;
}

time_t time(time_t *out) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (out != NULL) *out = exact.tv_sec;
    return exact.tv_sec;
}
