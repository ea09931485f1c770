/* The protocol of csrc/README.md, for Spin; tests/csrc/test_protocol_model.py builds and runs it.
 *
 * R ranks make CALLS calls, alternating between a gather (one signal) and an all-reduce that reduces in place (R
 * signals). Ranks write their slots and headers in two steps, so that a read in between is seen. Epochs have 8 bits and
 * start short of their wrap. A rank that has ended, well or not, is gone; others see that as they see a death.
 *
 *   DEATHS    this many ranks are killed, at any step
 *   MISMATCH  the last rank makes another call: 1 one with fewer signals, 2 (from the
 *             second call on) or 3 (from the first) one with more
 *   GATHERS   all calls are gathers
 *   NO_SLEEP  waits without the machinery of sleeping and waking, which multiplies the states
 *
 * A sleep ends when it is woken or when there is something to find (SOMETHING): a slice's end without that changes
 * nothing. So a state in which nobody can go on is a wait that only the time-out would end, and Spin reports it.
 *
 * Each mutant, a macro of its own, breaks one rule:
 *   FLAG_RESET        a flag instead of an epoch: the reader resets it
 *   FLAG_CONSTANT     a flag instead of an epoch: never reset
 *   ONE_SLOT          all calls use the same slot and header
 *   ONE_PEER          a gather waits only for the peer that it reads
 *   SUM_EARLY         the sum is published by the last partial's signal
 *   SLEEPERS_FIRST    the signaller looks for sleepers, then publishes
 *   NO_COMPARE        a sleeper sleeps without a last look at the epoch
 *   HEADER_LATE       data is read before the header is checked
 *   EPOCH_FIRST       a waiter looks at the epoch, then whether the peer is gone
 *   BLAME_POISONED    who finds a peer gone does not look for poison
 *   POISON_FIRST      who finds a peer gone looks for poison, then who else is gone
 *   LEAVE_EARLY       who loses the claim of the poison leaves at once
 *   NO_TAKEOVER       nobody replaces a writer of the poison that died
 */
#ifndef R
#define R 2
#endif
#ifndef CALLS
#define CALLS 3
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef MISMATCH
#define MISMATCH 0
#endif

#define FIRST 254
#define BIT(r) (1 << (r))
#define AFTER(r, step) (((r) + (step)) % R)

#define TORN 0
#define GATHER 1
#define REDUCE 2
#if MISMATCH == 1
#define KIND(rank, call) (((rank) == R - 1 || (call) % 2 == 0) -> GATHER : REDUCE)
#elif MISMATCH == 2
#define KIND(rank, call) (((rank) == R - 1 || (call) % 2 == 1) -> REDUCE : GATHER)
#elif MISMATCH == 3
#define KIND(rank, call) (((rank) == R - 1 || (call) % 2 == 0) -> REDUCE : GATHER)
#elif defined(GATHERS)
#define KIND(rank, call) GATHER
#else
#define KIND(rank, call) ((call) % 2 == 1 -> REDUCE : GATHER)
#endif
#define VALUE(call, kind, phase) ((call) * 8 + (kind) * 2 + (phase))

#define HEALTHY 0
#define READABLE 1
#define WRITTEN_BY 2

#define LOST 1
#define MISMATCHED 2

#define RUNNING 0
#define OK 1
#define FAILED 2

#ifdef ONE_SLOT
#define SLOT 0
#else
#define SLOT (call % 2)
#endif

#if defined(FLAG_RESET) || defined(FLAG_CONSTANT)
#define NEXT(epoch) 1
#define REACHED(seen, target) ((seen) == 1)
#else
#define NEXT(epoch) (((epoch) + 1) % 256)
#define REACHED(seen, target) ((((seen) - (target)) & 255) < 128)
#endif

typedef Slot { byte part[R] };
typedef Header { byte call; byte kind };
typedef Rank_slots { Slot slot[2] };
typedef Rank_headers { Header header[2] };

Rank_slots data[R];
Rank_headers said[R];
byte epoch[R] = FIRST;
byte sleepers[R];
byte asleep_on[R]; /* rank + 1; the kernel's queue of a futex */
byte killed; /* bit r: rank r */
bool gone[R];
byte outcome[R];
byte poison = HEALTHY;
byte poison_kind, poison_blamed; /* TORN while they are written */

#define ALIVE(r) ((killed & BIT(r)) == 0 && !gone[r])
#define ALIVE_WRITER (poison < WRITTEN_BY || ALIVE(poison - WRITTEN_BY))
#ifdef NO_TAKEOVER
#define REPLACEABLE false
#else
#define REPLACEABLE (poison >= WRITTEN_BY && !ALIVE(poison - WRITTEN_BY))
#endif
#define HEADER_WAITS(peer) ((agreed & BIT(peer)) == 0 && REACHED(epoch[peer], first + 1))
/* The last: it may have been killed between its signal and the wake-up. */
#define SOMETHING(peer) \
    (poison == READABLE || REPLACEABLE || HEADER_WAITS(peer) || (!ALIVE(peer) && !REACHED(epoch[peer], target)) || \
     (killed & BIT(peer)) != 0)

inline wake_sleepers_on(rank) {
    d_step {
        i = 0;
        do
        :: i < R ->
            if
            :: asleep_on[i] == rank + 1 -> asleep_on[i] = 0
            :: else
            fi;
            i++
        :: else -> break
        od;
        i = 0
    }
}

inline signal() {
#if defined(NO_SLEEP)
    epoch[me] = NEXT(epoch[me])
#elif defined(SLEEPERS_FIRST)
    seen = sleepers[me];
    epoch[me] = NEXT(epoch[me]);
    if
    :: seen != 0 -> wake_sleepers_on(me)
    :: else
    fi
#else
    epoch[me] = NEXT(epoch[me]);
    if
    :: sleepers[me] != 0 -> wake_sleepers_on(me)
    :: else
    fi
#endif
}

/* This rank leaves with an error of its own, `kind` and `blamed`. */
inline fail(kind, ranks) {
    assert(kind != LOST || ((ranks) & ~killed) == 0);
    do
    :: atomic { poison == HEALTHY -> poison = WRITTEN_BY + me; seen = true }; break
    :: atomic { REPLACEABLE -> poison = WRITTEN_BY + me; seen = true }; break
#ifdef LEAVE_EARLY
    :: atomic { poison != HEALTHY && !REPLACEABLE -> seen = false }; break
#else
    :: atomic { poison == READABLE -> seen = false }; break
#endif
    od;
    if
    :: seen ->
        d_step { poison_kind = TORN; poison_blamed = TORN };
        d_step { poison_kind = kind; poison_blamed = ranks };
        poison = READABLE
    :: else
    fi;
    goto failed
}
inline raise_if_poisoned() {
    if
    :: poison == READABLE -> assert(poison_kind != TORN && poison_blamed != TORN); goto failed
    :: else
    fi
}

inline check_header(peer) {
    if
    :: said[peer].header[SLOT].call == call && said[peer].header[SLOT].kind == kind_of_call -> agreed = agreed | BIT(peer)
    :: else ->
        assert(MISMATCH && said[peer].header[SLOT].call == call && said[peer].header[SLOT].kind != TORN);
        fail(MISMATCHED, BIT(peer))
    fi
}

inline note_dead_and_late(peer) {
    d_step { blamed = BIT(peer); other = 0 };
    do
    :: other == R -> break
    :: other == me || other == peer || (other < R && ALIVE(other)) -> other++
    :: other < R && other != me && other != peer && !ALIVE(other) ->
        if
        :: REACHED(epoch[other], target)
        :: else -> blamed = blamed | BIT(other)
        fi;
        other++
    od;
    other = 0
}

inline blame(peer) {
#if defined(BLAME_POISONED)
    note_dead_and_late(peer);
#elif defined(POISON_FIRST)
    raise_if_poisoned();
    note_dead_and_late(peer);
#else
    note_dead_and_late(peer);
    raise_if_poisoned();
#endif
    fail(LOST, blamed)
}

inline look_around(peer) {
    raise_if_poisoned();
    if
    :: HEADER_WAITS(peer) -> check_header(peer)
    :: else
    fi;
#ifdef EPOCH_FIRST
    if
    :: !REACHED(epoch[peer], target) ->
        if
        :: !ALIVE(peer) -> blame(peer)
        :: else
        fi
    :: else
    fi;
#else
    if
    :: !ALIVE(peer) ->
        if
        :: !REACHED(epoch[peer], target) -> blame(peer)
        :: else
        fi
    :: else
    fi;
#endif
#ifndef NO_TAKEOVER
    if
    :: poison >= WRITTEN_BY ->
        seen = poison;
        if
        :: seen >= WRITTEN_BY && !ALIVE(seen - WRITTEN_BY) ->
            blamed = BIT(seen - WRITTEN_BY);
            raise_if_poisoned();
            fail(LOST, blamed)
        :: else
        fi
    :: else
    fi
#endif
}

inline wait(peer, signals) {
    target = (first + (signals)) % 256;
    do
    :: REACHED(epoch[peer], target) -> break
    :: else ->
        look_around(peer);
#ifdef NO_SLEEP
        REACHED(epoch[peer], target) || SOMETHING(peer)
#else
        sleepers[peer]++;
        seen = epoch[peer];
        if
        :: REACHED(seen, target)
        :: else ->
            atomic {
                if
#ifndef NO_COMPARE
                :: epoch[peer] != seen
#endif
                :: else -> asleep_on[me] = peer + 1
                fi
            };
            if
            :: asleep_on[me] == 0
            :: SOMETHING(peer) -> asleep_on[me] = 0
            fi
        fi;
        sleepers[peer]--
#endif
    od;
#ifndef HEADER_LATE
    if
    :: (agreed & BIT(peer)) == 0 -> check_header(peer)
    :: else
    fi
#endif
}

inline read(peer, owner, phase) {
    assert(data[peer].slot[SLOT].part[owner] == VALUE(call, kind_of_call, phase))
#ifdef HEADER_LATE
    ;
    if
    :: (agreed & BIT(peer)) == 0 -> check_header(peer)
    :: else
    fi
#endif
}

inline write(owner, phase) {
    data[me].slot[SLOT].part[owner] = TORN;
    data[me].slot[SLOT].part[owner] = VALUE(call, kind_of_call, phase)
}

inline write_all() {
    d_step { i = 0; do :: i < R -> data[me].slot[SLOT].part[i] = TORN; i++ :: else -> break od; i = 0 };
    d_step {
        i = 0;
        do
        :: i < R -> data[me].slot[SLOT].part[i] = VALUE(call, kind_of_call, 0); i++
        :: else -> break
        od;
        i = 0
    }
}

inline begin() {
    d_step {
        call++;
        first = epoch[me];
        agreed = BIT(me);
        kind_of_call = KIND(me, call);
        said[me].header[SLOT].kind = TORN
    };
    d_step { said[me].header[SLOT].call = call; said[me].header[SLOT].kind = kind_of_call }
}

inline gather() {
    write_all();
    signal();
    step = 1;
    do
    :: step < R ->
        wait(AFTER(me, step), 1);
        read(AFTER(me, step), me, 0);
#ifdef FLAG_RESET
        epoch[AFTER(me, step)] = 0;
#endif
#ifdef ONE_PEER
        break;
#endif
        step++
    :: else -> break
    od
}

inline reduce() {
    step = 1;
    do
    :: step < R -> write(AFTER(me, step), 0); signal(); step++
    :: else -> break
    od;
    write(me, 0);
    step = 1;
    do
    :: step < R ->
        wait(AFTER(me, step), AFTER(me, R - AFTER(me, step)));
        read(AFTER(me, step), me, 0);
        step++
    :: else -> break
    od;
    write(me, 1);
    signal();
    step = 1;
    do
    :: step < R ->
#ifdef SUM_EARLY
        wait(AFTER(me, step), R - 1);
#else
        wait(AFTER(me, step), R);
#endif
        read(AFTER(me, step), AFTER(me, step), 1);
        step++
    :: else -> break
    od
}

proctype Rank(byte me) {
    byte call, kind_of_call, first, agreed, target, step, seen, blamed, other, i;
    {
        do
        :: call < CALLS ->
            begin();
            if
            :: kind_of_call == GATHER -> gather()
#if !defined(FLAG_RESET) && !defined(FLAG_CONSTANT)
            :: kind_of_call == REDUCE -> reduce()
#else
            :: kind_of_call == REDUCE -> gather() /* one signal is all that a flag can count */
#endif
            fi
        :: else -> break
        od;
        outcome[me] = OK;
        goto left;
failed: outcome[me] = FAILED;
left: gone[me] = true
    }
#if DEATHS > 0
    unless { (killed & BIT(me)) != 0 }
#endif
}

#if DEATHS > 0
active proctype Reaper() {
    byte count, victim;
    do
    :: count < DEATHS ->
        victim = 0;
        do
        :: victim < R - 1 -> victim++
        :: break
        od;
        killed = killed | BIT(victim);
        count++
    :: break
    od
}
#endif

init {
    byte rank;
    atomic {
        do
        :: rank < R -> run Rank(rank); rank++
        :: else -> break
        od
    };
    rank = 0;
    do
    :: rank < R ->
        gone[rank] || (killed & BIT(rank)) != 0;
#if MISMATCH
        assert((killed & BIT(rank)) != 0 || outcome[rank] == FAILED);
#elif DEATHS == 0
        assert(outcome[rank] == OK);
#endif
        rank++
    :: else -> break
    od
}
