"""The system calls that code under test may make, by their numbers on each processor.

All others are refused: those that open io_uring, trace, send signals to others, make namespaces,
mount, or hold memory that no limit counts (memfd, shared memory of System V).
"""

from typing import Any

_ALWAYS = """
read:0:63 write:1:64 close:3:57 fstat:5:80 lseek:8:62 mmap:9:222 mprotect:10:226 munmap:11:215
brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136
rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132 pread64:17:67 pwrite64:18:68
readv:19:65 writev:20:66 preadv:295:69 pwritev:296:70 preadv2:327:286 pwritev2:328:287
sched_yield:24:124 mremap:25:216 msync:26:227 mincore:27:232 madvise:28:233 dup:32:23 dup2:33:
dup3:292:24 pause:34: nanosleep:35:101 getitimer:36:102 setitimer:38:103 alarm:37: getpid:39:172
getppid:110:173 gettid:186:178 sendfile:40:71 fork:57: vfork:58: execve:59:221 execveat:322:281
exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95 uname:63:160 fsync:74:82 fdatasync:75:83
truncate:76:45 ftruncate:77:46 getcwd:79:17 chdir:80:49 fchdir:81:50 umask:95:166
gettimeofday:96:169 time:201: getrusage:98:165 sysinfo:99:179 times:100:153 getuid:102:174
getgid:104:176 geteuid:107:175 getegid:108:177 getgroups:115:158 getresuid:118:148
getresgid:120:150 setpgid:109:154 setsid:112:157 getpgid:121:155 getsid:124:156 getpgrp:111:
statfs:137:43 fstatfs:138:44 getpriority:140:141 sched_getparam:143:121
sched_getscheduler:145:120 sched_get_priority_max:146:125 sched_get_priority_min:147:126
sched_rr_get_interval:148:127 sched_getaffinity:204:123 futex:202:98 set_tid_address:218:96
set_robust_list:273:99 restart_syscall:219:128 fadvise64:221:223 timer_create:222:107
timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109 timer_delete:226:111
clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115 epoll_create:213:
epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232: epoll_pwait:281:22 epoll_pwait2:441:441
open:2: openat:257:56 openat2:437:437 stat:4: lstat:6: newfstatat:262:79 statx:332:291 access:21:
faccessat:269:48 faccessat2:439:439 mkdir:83: mkdirat:258:34 rmdir:84: creat:85: link:86:
linkat:265:37 unlink:87: unlinkat:263:35 symlink:88: symlinkat:266:36 readlink:89:
readlinkat:267:78 rename:82: renameat:264:38 renameat2:316:276 mknodat:259:33 fchmod:91:52
poll:7: ppoll:271:73 select:23: pselect6:270:72 pipe:22: pipe2:293:59 splice:275:76 tee:276:77
sync_file_range:277:84 timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87
eventfd:284: eventfd2:290:19 signalfd4:289:74 fallocate:285:47 getrandom:318:278
copy_file_range:326:285 rseq:334:293 getcpu:309:168 close_range:436:436 membarrier:324:283
getdents:78: getdents64:217:61 flock:73:32 futex_waitv:449:449 getrlimit:97:163
setrlimit:160:164 arch_prctl:158: capget:125:90 socketpair:53:199 recvfrom:45:207 recvmsg:47:212
getsockname:51:204 getsockopt:55:209 setsockopt:54:208 shutdown:48:210
"""
"""What only reaches the process itself and what it opened, as `name:x86_64:aarch64`."""
_IN_NAMESPACES = """
kill:62:129 tkill:200:130 tgkill:234:131 rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240
socket:41:198 connect:42:203 bind:49:200 listen:50:201 accept:43:202 accept4:288:242
sendmsg:46:211 sendmmsg:307:269 recvmmsg:299:243 getpeername:52:205 chmod:90: fchmodat:268:53
chown:92: fchown:93:55 lchown:94: fchownat:260:54 utime:132: utimes:235: futimesat:261:
utimensat:280:88 mknod:133: setpriority:141:140 sched_setaffinity:203:122 sched_setparam:142:118
sched_setscheduler:144:119 pidfd_open:434:434 pidfd_send_signal:424:424 inotify_init1:294:26
inotify_add_watch:254:27 inotify_rm_watch:255:28 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10
listxattr:194:11 llistxattr:195:12 flistxattr:196:13 setxattr:188:5 lsetxattr:189:6
fsetxattr:190:7 mlock:149:228 munlock:150:229
"""
"""What reaches others, of which there are none but its own in namespaces."""


_RULED = "fcntl:72:25 ioctl:16:29 prctl:157:167 prlimit64:302:261 clone:56:220 sendto:44:206"
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COMMANDS = {
    "fcntl": [0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032],
    "ioctl": [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451],
    "prctl": [15, 16, 21, 0x53564D41],
    "prlimit64": [0],
}
"""What may be asked: of files, no owner and no signal (F_SETOWN, F_SETSIG); of terminals, their
size; of processes, their names; limits of itself."""
_NEW_NAMESPACES = 0x7E020080
"""Flags of clone."""


def allowed(machine: str, *, namespaces: bool) -> dict[str, Any] | None:
    """Return the calls that are allowed on a processor; None where their numbers are not known.

    `ruled` are those of which one argument is looked at: its place, the values that it may have,
    the bits that it may not have.
    """
    if machine not in _AUDIT:
        return None
    at = list(_AUDIT).index(machine)
    numbers = set(_numbers(_ALWAYS + (_IN_NAMESPACES if namespaces else ""), at).values())
    ruled = _numbers(_RULED, at)
    free = {"fcntl", "prlimit64", "sendto"} if namespaces else set[str]()
    numbers |= {ruled[name] for name in free}
    rules = [
        (ruled[name], 0 if name.startswith("pr") else 1, values, 0)
        for name, values in _COMMANDS.items()
        if name not in free
    ]
    if not namespaces:  # to nobody but the other end
        rules.append((ruled["sendto"], 4, [0], 0))
    rules.append((ruled["clone"], 0, [], _NEW_NAMESPACES))
    return {"audit": _AUDIT[machine], "numbers": sorted(numbers), "ruled": rules}


def _numbers(table: str, at: int) -> dict[str, int]:
    parts = [one.split(":") for one in table.split()]
    return {name: int(numbers[at]) for name, *numbers in parts if numbers[at]}
