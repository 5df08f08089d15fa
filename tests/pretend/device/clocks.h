// Streams and their vector clocks. A stream's clock says how far of every stream it has waited for; an
// access that is not ordered after the other stream's access to the same bytes is a race, every time.
#pragma once
#include <c10/core/Stream.h>

#include <cstdio>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "settings.h"

namespace pretend {
using Clock = std::vector<uint64_t>;  // by a stream's number

inline uint64_t at_stream(const Clock& clock, int number) { return (size_t)number < clock.size() ? clock[number] : 0; }
inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

struct StreamState {
  int device, id, number;
  bool is_group = false;  // a process group's own
  Clock clock;
};
inline std::vector<std::unique_ptr<StreamState>>& streams() {
  static auto* all = new std::vector<std::unique_ptr<StreamState>>();
  return *all;
}
// By device and stream id; id 0 is the default stream.
inline std::vector<std::vector<int>>& stream_numbers() {
  static auto* all = new std::vector<std::vector<int>>();
  return *all;
}
inline Clock host_clock;  // what the host has waited for
inline thread_local int current_device = 0;
inline thread_local std::vector<int> current_streams;  // by device: a number, or -1

inline int add_stream(int device, bool is_group = false) {
  auto& all = stream_numbers();
  if ((int)all.size() <= device) all.resize(device + 1);
  auto state = std::make_unique<StreamState>();
  state->device = device;
  state->id = (int)all[device].size();
  state->number = (int)streams().size();
  state->is_group = is_group;
  all[device].push_back(state->number);
  streams().push_back(std::move(state));
  return streams().back()->number;
}
inline StreamState& default_stream(int device) {
  auto& all = stream_numbers();
  if ((int)all.size() <= device) all.resize(device + 1);
  if (all[device].empty()) add_stream(device);
  return *streams()[all[device][0]];
}
// Streams come from a pool of 32 a device, as CUDA's.
inline StreamState& pooled_stream(int device) {
  constexpr size_t kPool = 32;
  static auto* pools = new std::map<int, std::pair<std::vector<int>, size_t>>();
  default_stream(device);
  auto& [pool, next] = (*pools)[device];
  if (pool.size() < kPool) {
    pool.push_back(add_stream(device));
    return *streams()[pool.back()];
  }
  return *streams()[pool[next++ % kPool]];
}
inline StreamState& stream_of(int device) {
  if ((int)current_streams.size() <= device) current_streams.resize(device + 1, -1);
  int number = current_streams[device];
  return number < 0 ? default_stream(device) : *streams()[number];
}
inline Stream as_stream(const StreamState& s) {
  return Stream(Stream::UNSAFE, Device(kPretend, (DeviceIndex)s.device), (StreamId)s.id);
}
inline StreamState& state_of(const Stream& s) {
  auto& first = default_stream(s.device_index());
  auto& ids = stream_numbers()[s.device_index()];
  TORCH_CHECK((size_t)s.id() < ids.size(), "pretend: no such stream");
  return s.id() == 0 ? first : *streams()[ids[s.id()]];
}
// One more piece of work on a stream. It comes after all that the host has waited for.
inline uint64_t tick(StreamState& s) {
  join(s.clock, host_clock);
  if ((int)s.clock.size() <= s.number) s.clock.resize(s.number + 1, 0);
  return ++s.clock[s.number];
}

// ---------------------------------------------------------------- races
enum class Races { OFF, WARN, RAISE };
inline Races race_mode() {
  static const Races mode = [] {
    auto text = setting("PRETEND_RACES", "raise");
    return text == "off" ? Races::OFF : text == "warn" ? Races::WARN : Races::RAISE;
  }();
  return mode;
}
inline std::vector<std::string> race_log;

inline void report_race(const std::string& what) {
  counters.races++;
  if (race_log.size() < 100) race_log.push_back(what);
  static const std::string path = setting("PRETEND_RACE_LOG", "");
  if (!path.empty()) {  // at once: whoever swallows the error, or ends at once, hides nothing
    if (auto* file = std::fopen(path.c_str(), "a")) {
      std::fprintf(file, "%s\n", what.c_str());
      std::fclose(file);
    }
  }
  if (race_mode() == Races::WARN) TORCH_WARN("pretend: race: ", what);
  TORCH_CHECK(race_mode() != Races::RAISE, "pretend: race: ", what);
}
inline std::string stream_name(int number) {
  auto& s = *streams()[number];
  return (s.is_group ? "group stream " : "stream ") + std::to_string(s.id) + " of device " + std::to_string(s.device);
}

struct Access {
  int stream = -1;
  uint64_t when = 0;
};
inline bool is_ordered(const Clock& clock, const Access& access) {
  return access.stream < 0 || at_stream(clock, access.stream) >= access.when;
}
// What was last done to some bytes of a block.
struct Span {
  size_t end = 0;
  Access wrote;
  std::vector<Access> reads;  // since it was written, one a stream
};
using Spans = std::map<size_t, Span>;  // by their first byte

inline void split_spans(Spans& spans, size_t at) {
  auto it = spans.upper_bound(at);
  if (it == spans.begin()) return;
  --it;
  if (it->first == at || it->second.end <= at) return;
  Span rest = it->second;
  it->second.end = at;
  spans.emplace(at, std::move(rest));
}
inline void touch_spans(Spans& spans, size_t first, size_t end, const StreamState& s, bool writes, const std::string& op) {
  split_spans(spans, first);
  split_spans(spans, end);
  const Access now{s.number, at_stream(s.clock, s.number)};
  auto begin = spans.lower_bound(first), stop = spans.lower_bound(end);
  for (auto it = begin; it != stop; ++it) {
    auto& span = it->second;
    if (!is_ordered(s.clock, span.wrote))
      report_race(op + " on " + stream_name(s.number) + (writes ? " writes" : " reads") + " what " +
                  stream_name(span.wrote.stream) + " wrote, with no wait between");
    if (writes) {
      for (auto& read : span.reads)
        if (!is_ordered(s.clock, read))
          report_race(op + " on " + stream_name(s.number) + " writes what " + stream_name(read.stream) + " still reads");
      continue;
    }
    auto mine = std::find_if(span.reads.begin(), span.reads.end(), [&](auto& read) { return read.stream == s.number; });
    if (mine == span.reads.end()) span.reads.push_back(now); else mine->when = now.when;
  }
  if (writes) {
    spans.erase(begin, stop);
    spans.emplace(first, Span{end, now, {}});
  }
}
}  // namespace pretend
