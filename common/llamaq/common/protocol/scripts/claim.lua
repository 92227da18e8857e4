-- Claims jobs of one partition for a worker: begins a new attempt of each, which prepares the job and waits for a slot.
-- `flush.lua` starts the job when it has a slot.
--
-- Keys of job i, where i counts from 0:
-- KEYS[3i+1]  job     hash of the job
-- KEYS[3i+2]  events  stream of the job's events
-- KEYS[3i+3]  stream  job stream that the job's entry was read from
--
-- ARGV[1]  group     consumer group of the job streams
-- ARGV[2]  worker    id of the worker
-- ARGV[3]  lease_ms  how long the worker keeps a job without a renewal, in ms
-- ARGV[4]  at_risk   '1': the worker prepares the jobs now, so its death counts as a crash; '0': it does not yet
-- ARGV[5]  model     fingerprint of the worker's model; '': not known
-- ARGV[6]  restart   '1': the worker starts a job of another model again, if possible; '0': it leaves the job
-- ARGV[7]  values    msgpack of an array with three values for each job
--     1  entry    id of the job's entry
--     2  channel  channel of the job's events
--     3  from     number of the attempt that waits for a slot in another worker, from which the job is taken; '': any
--
-- With `from`, a death of the other worker is counted as in check_crash.lua, because this worker may have died. If it
-- is alive, its next call for its attempt returns 'lost' and removes the death.
--
-- Returns an array with one reply for each job. If the requests of the first jobs are large, it has replies to these jobs
-- only, and the others are unchanged: the caller calls again for them.
--         {'run', attempt, request, generated, waited_ms, queue_ms, slot_ms, left_ms, retries_left, token_times}
--                    the attempt has begun; `generated` tokens are stored. `waited_ms` is the time since the
--                    submit, or since a later time for which the job was submitted, `queue_ms` the time from then to
--                    the first slot, -1 if the job had no slot so far, `slot_ms` the
--                    time that it has had a slot, `left_ms` the time until its deadline, -1 if it has none,
--                    `retries_left` the number of its retries, -1 if it was submitted without retries.
--                    `token_times` tells when the stored tokens were generated
--         {'gone'}   the job does not exist; the caller makes a dead letter of the entry
--         {'done'}   the job has ended, or this is not its entry; the entry was dropped
--         {'ended'}  the job was cancelled, or has reached a deadline or its timeout; it has ended here
--         {'stale'}  the job is no longer waiting in the attempt `from`
--         {'paused'} the queue is paused, and the job had no slot so far; the entry is requeued
--         {'left'}   the job is left to a worker with the model that has begun it
--         {'error', text}  the keys of the job have unexpected content: another client has overwritten them

local by = {
  group = ARGV[1], worker = ARGV[2], lease_ms = ARGV[3], at_risk = ARGV[4] == '1', model = ARGV[5], restarts = ARGV[6] == '1',
  now = now_ms(), paused = is_paused(KEYS[3]), has_leased = false, n_attempts = 0, n_bytes = 0,
}
local values, replies = cmsgpack.unpack(ARGV[7]), {}

for i = 0, #KEYS / 3 - 1 do
  local job, events, stream = unpack(KEYS, 3 * i + 1, 3 * i + 3)
  replies[i + 1] = for_one_job(claim_job, by, job, events, stream, unpack(values, 3 * i + 1, 3 * i + 3))
  if by.n_bytes >= MAX_CLAIMED_BYTES then
    break
  end
end
if by.n_attempts > 0 then
  count_events(KEYS[1], 'attempts', by.n_attempts)
end
return reply_for_jobs(replies)
