// What a stream has not yet done: copies from and to pinned memory, made as late as the stream allows, and
// collectives under way. The host waits here, and only here.
#pragma once
#include <ATen/ATen.h>

#include <condition_variable>
#include <deque>

#include "memory.h"

namespace pretend {
struct Copy {
  int stream;
  uint64_t when;
  bool to_host;
  at::Tensor host, device;  // tensors of the CPU over the pinned bytes, and over the device's or a snapshot of them
  char* pinned;
};
inline std::deque<Copy>& copies() {
  static auto* all = new std::deque<Copy>();
  return *all;
}
inline void make(Copy& copy) {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  if (copy.to_host) copy.host.copy_(copy.device); else copy.device.copy_(copy.host);
  auto it = pinned_blocks().find(copy.pinned);
  if (it != pinned_blocks().end() && --it->second.copies == 0 && it->second.is_freed) free_pinned(it);
}
template <typename Due>
void make_copies(const Due& due) {
  auto& all = copies();
  for (size_t i = 0; i < all.size();) {
    if (!due(all[i])) {
      ++i;
      continue;
    }
    Copy copy = std::move(all[i]);
    all.erase(all.begin() + (int64_t)i);
    make(copy);
  }
}
// Before a kernel runs: what was copied to the device must be there; what was copied to the host need not be
// before the host waits. A copy from pinned bytes that an earlier copy is still to fill takes that one along.
inline void make_copies_to_device(const Clock& upto) {
  if (copies().empty()) return;
  auto due = [&](const Copy& c) { return !c.to_host && at_stream(upto, c.stream) >= c.when; };
  std::set<char*> sources;
  for (auto& copy : copies()) if (due(copy)) sources.insert(copy.pinned);
  if (sources.empty()) return;
  make_copies([&](const Copy& c) {
    return due(c) || (c.to_host && sources.count(c.pinned) && at_stream(upto, c.stream) >= c.when);
  });
}

// A collective under way.
struct Flight {
  int stream = 0;
  uint64_t when = 0;
  std::vector<std::pair<Block*, bool>> blocks;  // and whether it is written
  enum { RUNNING, DONE, ABORTED } state = RUNNING;
  std::string cause;  // why it hangs
};
inline std::vector<std::shared_ptr<Flight>>& flights() {
  static auto* all = new std::vector<std::shared_ptr<Flight>>();
  return *all;
}
inline std::condition_variable_any& landed() {
  static auto* condition = new std::condition_variable_any();
  return *condition;
}
inline void land(Flight& flight, bool is_aborted) {
  if (flight.state != Flight::RUNNING) return;
  flight.state = is_aborted ? Flight::ABORTED : Flight::DONE;
  for (auto& [block, writes] : flight.blocks) (writes ? block->flying_writes : block->flying_reads)--;
  std::erase_if(flights(), [&](auto& f) { return f.get() == &flight; });
  landed().notify_all();
}
inline bool is_done(const Clock& clock) {
  for (auto& c : copies()) if (at_stream(clock, c.stream) >= c.when) return false;
  for (auto& f : flights()) if (at_stream(clock, f->stream) >= f->when) return false;
  return true;
}

// The host waits for all up to a clock: from here on it has seen it. The lock is held once, and let go meanwhile.
inline void wait_uncounted(Lock& lock, const Clock& upto) {
  landed().wait(lock, [&] {
    return std::none_of(flights().begin(), flights().end(), [&](auto& f) { return at_stream(upto, f->stream) >= f->when; });
  });
  join(host_clock, upto);
  make_copies([](const Copy& c) { return at_stream(host_clock, c.stream) >= c.when; });
}
inline void host_waits(Lock& lock, Wait why, const Clock& upto) {
  count_wait(why);
  wait_uncounted(lock, Clock(upto));
}
inline Clock device_clock(int device) {
  Clock all;
  for (auto& s : streams()) if (s->device == device) join(all, s->clock);
  return all;
}
}  // namespace pretend
