/* A wall clock that a test can shift, and a machine that seems to have been suspended, preloaded into a process. The
 * monotonic clock stays as it is: it does not count a suspension.
 *
 * Both of process N, seconds as two doubles, are the file N in the folder $TEST_CLOCK_FOLDER: mapped, so that whoever
 * writes it moves the clocks at once. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static double none[2];
static volatile double *shifts_s = none;
enum { WALL, SUSPENDED };

__attribute__((constructor)) static void map_shift(void) {
    const char *folder = getenv("TEST_CLOCK_FOLDER");
    char path[PATH_MAX];
    if (folder == NULL || snprintf(path, sizeof path, "%s/%d", folder, getpid()) >= (int)sizeof path) return;
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) return;
    if (ftruncate(file, sizeof none) == 0) {
        void *mapped = mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
        if (mapped != MAP_FAILED) shifts_s = mapped;
    }
    close(file);
}

/* A process that was forked has a clock of its own. */
__attribute__((constructor)) static void map_shift_of_forks(void) { pthread_atfork(NULL, NULL, map_shift); }

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, now);
    if (status == 0 && id == CLOCK_REALTIME) now->tv_sec += (time_t)shifts_s[WALL];
    if (status == 0 && id == CLOCK_BOOTTIME) now->tv_sec += (time_t)shifts_s[SUSPENDED];
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
