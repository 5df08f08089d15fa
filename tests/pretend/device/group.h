// A process group of the devices, over gloo on the device's bytes, with a stream of its own, as NCCL's and HCCL's.
// A call returns at once, Work.wait() makes the current stream wait and not the host. When a peer dies, the
// collective hangs, and with it all that waits for it, until the group is aborted; its results are poison then.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdio>
#include <thread>

#include "kernels.h"

namespace pretend {
using Tensors = std::vector<at::Tensor>;
using Milliseconds = std::chrono::milliseconds;
using InnerWork = intrusive_ptr<c10d::Work>;

inline std::string backend_name() {
  static const std::string name = setting("PRETEND_BACKEND", device_name() == "npu" ? "hccl" : (device_name() + "cl").c_str());
  return name;
}

struct Collective {
  std::shared_ptr<Flight> flight;
  std::vector<std::pair<void*, size_t>> results;  // the bytes that it writes
  InnerWork inner;
  std::function<void()> after;
  std::string what;
};
// What a group and the thread that watches its collectives share.
struct Watched {
  intrusive_ptr<c10d::Backend> gloo;
  int rank;
  std::mutex mutex;
  std::condition_variable condition;
  std::deque<std::shared_ptr<Collective>> queue;
  bool is_closed = false, is_waiting = false;
  std::atomic<bool> is_aborted{false};
  std::vector<std::shared_ptr<Collective>> flying;  // under the lock of accounts

  void abort() {
    Lock lock(accounts());
    is_aborted = true;
    auto all = std::move(flying);
    flying.clear();
    for (auto& one : all) {
      if (one->flight->state != Flight::RUNNING) continue;
      for (auto& [body, n] : one->results) std::memset(body, 0xFF, n);
      land(*one->flight, true);
      if (!one->inner) continue;
      try {
        one->inner->abort();  // ends the waits of send and recv; others know no abort
      } catch (const std::exception&) {
      }
    }
  }
  void land_one(Collective& one) {
    Lock lock(accounts());
    if (one.flight->state == Flight::RUNNING) {
      if (one.after) one.after();
      land(*one.flight, false);
    }
    std::erase_if(flying, [&](auto& f) { return f.get() == &one; });
  }
  void hang(Collective& one, const std::string& cause) {
    Lock lock(accounts());
    if (one.flight->state != Flight::RUNNING) return;
    one.flight->cause = cause;
    std::fprintf(stderr, "pretend: %s of rank %d hangs: %s\n", one.what.c_str(), rank, cause.c_str());
    if (cause.find("imed out") != std::string::npos) abort();  // as the watchdog's
  }
  void watch() {
    bool hangs = false;  // what comes behind a collective that hangs, hangs
    while (true) {
      std::shared_ptr<Collective> one;
      {
        std::unique_lock<std::mutex> lock(mutex);
        condition.wait(lock, [&] { return is_closed || !queue.empty(); });
        if (queue.empty()) return;
        one = std::move(queue.front());
        queue.pop_front();
        if (hangs) continue;
        is_waiting = true;
      }
      std::string cause;
      try {
        one->inner->wait(kNoTimeout);
        land_one(*one);
      } catch (const std::exception& error) {
        cause = error.what();
        hangs = true;
      }
      if (hangs) hang(*one, cause);
      one->inner.reset();
      std::unique_lock<std::mutex> lock(mutex);
      is_waiting = false;
    }
  }
};

struct GroupWork final : c10d::Work {
  std::shared_ptr<Flight> flight;
  Clock clock;
  int device;
  bool is_barrier = false;
  Tensors outputs;
  intrusive_ptr<ivalue::Future> future;
  GroupWork(c10d::OpType type, std::shared_ptr<Flight> f, Clock c, int d) : Work(-1, type), flight(std::move(f)), clock(std::move(c)), device(d) {}

  void check() const {
    if (flight->state == Flight::ABORTED)
      C10_THROW_ERROR(DistBackendError, upper_name() + " communicator was aborted." + (flight->cause.empty() ? "" : " It hung: " + flight->cause));
  }
  bool isCompleted() override {
    Lock lock(accounts());
    if (flight->state == Flight::DONE) join(host_clock, clock);
    return flight->state != Flight::RUNNING;
  }
  bool isSuccess() const override { return flight->state == Flight::DONE; }
  std::exception_ptr exception() const override {
    try {
      check();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }
  Tensors result() override { return outputs; }
  bool wait(Milliseconds timeout) override {
    Lock lock(accounts());
    check();
    join(stream_of(device).clock, clock);
    if (is_barrier) host_waits(lock, Wait::BARRIER, clock);
    if (timeout != kNoTimeout && !landed().wait_for(lock, timeout, [&] { return flight->state != Flight::RUNNING; }))
      C10_THROW_ERROR(DistBackendError, "pretend: timed out waiting for a collective");
    check();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void abort() override {}
  intrusive_ptr<ivalue::Future> getFuture() override { return future; }
};

struct Group final : c10d::Backend {
  std::shared_ptr<Watched> shared = std::make_shared<Watched>();
  std::thread watcher;
  std::map<int, int> own_streams;  // by device
  Group(intrusive_ptr<c10d::Backend> gloo, int rank, int size) : Backend(rank, size) {
    shared->gloo = std::move(gloo);
    shared->rank = rank;
  }
  ~Group() override {
    if (!watcher.joinable()) return;
    bool is_stuck = false;
    {
      std::unique_lock<std::mutex> lock(shared->mutex);
      shared->is_closed = true;
      is_stuck = shared->is_waiting;
      shared->condition.notify_all();
    }
    if (!is_stuck) {
      watcher.join();
      return;
    }
    watcher.detach();
    new std::shared_ptr<Watched>(shared);  // gloo's own threads are still in it: never end it
  }
  const std::string getBackendName() const override { return backend_name(); }
  void setTimeout(Milliseconds t) override { shared->gloo->setTimeout(t); }
  void setSequenceNumberForGroup() override { shared->gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return shared->gloo->getSequenceNumberForGroup(); }
  bool is_hanging() {
    Lock lock(accounts());
    return std::any_of(shared->flying.begin(), shared->flying.end(), [](auto& one) { return !one->flight->cause.empty(); });
  }
  c10d::ErrorType getError() override {
    return shared->is_aborted || is_hanging() ? c10d::ErrorType::REMOTE_ERROR : c10d::ErrorType::SUCCESS;
  }
  // As NCCL's, it returns when no kernel of the group is at work any more: the host has seen them all.
  void abort() override {
    shared->abort();
    Lock lock(accounts());
    for (auto& [device, number] : own_streams) join(host_clock, streams()[number]->clock);
  }
  void shutdown() override {}

  // One collective: `launch` starts gloo's on aliases of the tensors; `after` finishes it.
  using Launch = std::function<InnerWork()>;
  InnerWork collective(c10d::OpType type, const char* what, const Tensors& reads, const Tensors& writes, const Tensors& outputs, const Launch& launch,
                       std::function<void()> after = {}) {
    if (shared->is_aborted) C10_THROW_ERROR(DistBackendError, upper_name() + " communicator was aborted");
    std::vector<Touch> touches;
    int device = -1;
    for (auto* list : {&reads, &writes})
      for (auto& t : *list) {
        TORCH_CHECK(t.device().type() == kPretend, "No backend type associated with device type ", t.device().type(), " (", what, ")");
        TORCH_CHECK(device < 0 || device == t.device().index(), "pretend: tensors of two devices in one collective");
        device = t.device().index();
        touches.push_back({t, list == &writes});
      }
    if (device < 0) device = current_device;
    auto one = std::make_shared<Collective>();
    one->what = what;
    one->after = std::move(after);
    one->flight = std::make_shared<Flight>();
    auto work = [&] {
      Entry entry(touches);
      memory_of(device);
      if (!own_streams.count(device)) own_streams[device] = add_group_stream(device);
      auto& mine = *streams()[own_streams[device]];
      auto& current = stream_of(device);
      tick(current);
      make_copies_to_device(current.clock);
      join(mine.clock, current.clock);
      tick(mine);
      one->flight->stream = mine.number;
      one->flight->when = at_stream(mine.clock, mine.number);
      for (auto& [t, writes] : touches) {
        touch(mine, t, writes, what);
        if (auto* block = block_of(t)) {
          (writes ? block->flying_writes : block->flying_reads)++;
          one->flight->blocks.emplace_back(block, writes);
          auto [first, end] = extent(t);
          if (writes) one->results.emplace_back(memories()[device]->body + block->offset + first, end - first);
        }
      }
      counters.collectives++;
      flights().push_back(one->flight);
      shared->flying.push_back(one);
      auto made = make_intrusive<GroupWork>(type, one->flight, mine.clock, device);
      made->outputs = outputs;
      // A future of the group's stream, done at once: who waits for it makes a stream wait.
      made->future = make_intrusive<ivalue::Future>(ListType::create(TensorType::get()), std::vector<Device>{Device(kPretend, (DeviceIndex)device)});
      const int before = current_streams[device];
      current_streams[device] = mine.number;
      made->future->markCompleted(IValue(outputs));
      current_streams[device] = before;
      return made;
    }();
    try {
      at::NoGradGuard no_grad;
      one->inner = launch();
    } catch (const std::exception& error) {
      bool is_ours = true;
      for (const char* words : {"onnection", "eset by peer", "imed out", "closed", "pipe"}) is_ours &= std::string(error.what()).find(words) == std::string::npos;
      if (is_ours) {
        shared->land_one(*one);
        throw;
      }
      shared->hang(*one, error.what());  // the peer is dead already
      return work;
    }
    if (!watcher.joinable()) watcher = std::thread([all = shared] { all->watch(); });
    std::unique_lock<std::mutex> lock(shared->mutex);
    shared->queue.push_back(one);
    shared->condition.notify_all();
    return work;
  }
  static int add_group_stream(int device) {
    default_stream(device);
    return add_stream(device, true);
  }
  static Tensors twins(const Tensors& list) {
    Tensors out;
    for (auto& t : list) out.push_back(alias_alone(t));
    return out;
  }
  static std::vector<Tensors> twins(const std::vector<Tensors>& lists) {
    std::vector<Tensors> out;
    for (auto& list : lists) out.push_back(twins(list));
    return out;
  }
  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors out;
    for (auto& list : lists) out.insert(out.end(), list.begin(), list.end());
    return out;
  }
  // gloo knows no mean.
  template <typename Options>
  std::function<void()> mean(Options& options, const Tensors& results) {
    if (options.reduceOp != c10d::ReduceOp::AVG) return {};
    options.reduceOp = c10d::ReduceOp::SUM;
    return [results, n = size_] {
      at::NoGradGuard no_grad;
      at::AutoDispatchBelowADInplaceOrView below;
      for (auto t : results) {
        if (t.is_floating_point() || t.is_complex()) t.div_(n); else t.div_(n, "trunc");
      }
    };
  }
  using Op = c10d::OpType;

  InnerWork broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    auto a = twins(t);
    const bool is_root = o.rootRank == rank_;
    return collective(Op::BROADCAST, "broadcast", is_root ? t : Tensors{}, is_root ? Tensors{} : t, t, [&] { return shared->gloo->broadcast(a, o); });
  }
  InnerWork allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    auto a = twins(t);
    auto options = o;
    auto after = mean(options, a);
    return collective(Op::ALLREDUCE, "allreduce", {}, t, t, [&] { return shared->gloo->allreduce(a, options); }, after);
  }
  InnerWork allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    auto a = twins(t);
    auto options = o;
    auto after = mean(options, a);
    return collective(Op::ALLREDUCE_COALESCED, "allreduce_coalesced", {}, t, t, [&] { return shared->gloo->allreduce_coalesced(a, options); }, after);
  }
  InnerWork reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    auto a = twins(t);
    auto options = o;
    auto after = mean(options, o.rootRank == rank_ ? a : Tensors{});
    return collective(Op::REDUCE, "reduce", {}, t, t, [&] { return shared->gloo->reduce(a, options); }, after);
  }
  InnerWork allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto oa = twins(out);
    auto ia = twins(in);
    return collective(Op::ALLGATHER, "allgather", in, flat(out), flat(out), [&] { return shared->gloo->allgather(oa, ia, o); });
  }
  InnerWork _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    auto oa = alias_alone(out), ia = alias_alone(in);
    return collective(Op::_ALLGATHER_BASE, "allgather", {in}, {out}, {out}, [&] { return shared->gloo->_allgather_base(oa, ia, o); });
  }
  InnerWork allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto oa = twins(out), ia = twins(in);
    return collective(Op::COALESCED, "allgather", in, out, out, [&] { return shared->gloo->allgather_into_tensor_coalesced(oa, ia, o); });
  }
  InnerWork gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& o) override {
    auto oa = twins(out);
    auto ia = twins(in);
    return collective(Op::GATHER, "gather", in, flat(out), flat(out), [&] { return shared->gloo->gather(oa, ia, o); });
  }
  InnerWork scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) override {
    auto oa = twins(out);
    auto ia = twins(in);
    return collective(Op::SCATTER, "scatter", flat(in), out, out, [&] { return shared->gloo->scatter(oa, ia, o); });
  }
  InnerWork reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& o) override {
    auto oa = twins(out);
    auto ia = twins(in);
    auto options = o;
    auto after = mean(options, oa);
    return collective(Op::REDUCE_SCATTER, "reduce_scatter", flat(in), out, out, [&] { return shared->gloo->reduce_scatter(oa, ia, options); }, after);
  }
  InnerWork _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    auto oa = alias_alone(out), ia = alias_alone(in);
    auto options = o;
    auto after = mean(options, {oa});
    return collective(Op::_REDUCE_SCATTER_BASE, "reduce_scatter", {in}, {out}, {out},
                      [&] { return shared->gloo->_reduce_scatter_base(oa, ia, options); }, after);
  }
  InnerWork reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    auto oa = twins(out), ia = twins(in);
    auto options = o;
    auto after = mean(options, oa);
    return collective(Op::COALESCED, "reduce_scatter", in, out, out,
                      [&] { return shared->gloo->reduce_scatter_tensor_coalesced(oa, ia, options); }, after);
  }
  InnerWork alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& os, std::vector<int64_t>& is, const c10d::AllToAllOptions& o) override {
    auto oa = alias_alone(out), ia = alias_alone(in);
    return collective(Op::ALLTOALL_BASE, "alltoall", {in}, {out}, {out}, [&] { return shared->gloo->alltoall_base(oa, ia, os, is, o); });
  }
  InnerWork alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    auto oa = twins(out), ia = twins(in);
    return collective(Op::ALLTOALL, "alltoall", in, out, out, [&] { return shared->gloo->alltoall(oa, ia, o); });
  }
  // As with NCCL's and HCCL's, tags say nothing: messages are matched in the order in which they were posted.
  InnerWork send(Tensors& t, int to, int) override {
    auto a = twins(t);
    return collective(Op::SEND, "send", t, {}, {}, [&] { return shared->gloo->send(a, to, 0); });
  }
  InnerWork recv(Tensors& t, int from, int) override {
    auto a = twins(t);
    return collective(Op::RECV, "recv", {}, t, t, [&] { return shared->gloo->recv(a, from, 0); });
  }
  InnerWork barrier(const c10d::BarrierOptions& o) override {
    auto work = collective(Op::BARRIER, "barrier", {}, {}, {}, [&] {
      c10d::BarrierOptions options;
      options.timeout = o.timeout;
      return shared->gloo->barrier(options);
    });
    static_cast<GroupWork*>(work.get())->is_barrier = true;
    return work;
  }
};
}  // namespace pretend
