package headrace_test

import (
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"headrace.dev/go/headrace"
	headracev1 "headrace.dev/go/headrace/v1"
)

func TestAnAdapterIsLoadedAsAsked(t *testing.T) {
	var got []*headracev1.LoadAdapterRequest
	client := serve(t, &script{load: func(request *headracev1.LoadAdapterRequest) (*headracev1.LoadAdapterResponse, error) {
		got = append(got, request)
		return &headracev1.LoadAdapterResponse{Adapter: &headracev1.Adapter{Name: request.GetName()}, Evicted: []string{"old"}}, nil
	}})
	answer, err := client.Control().LoadAdapter(soon(t), "team-a", "a/v1", nil)
	if err != nil || answer.GetAdapter().GetName() != "team-a" || !slices.Equal(answer.GetEvicted(), []string{"old"}) {
		t.Fatalf("got %v, %v", answer, err)
	}
	options := &headrace.LoadOptions{Pinned: true, Replace: true}
	if _, err := client.Control().LoadAdapter(soon(t), "team-a", "a/v2", options); err != nil {
		t.Fatal(err)
	}
	if got[0].GetSource() != "a/v1" || got[0].GetPinned() || got[0].GetReplace() || !got[1].GetPinned() || !got[1].GetReplace() {
		t.Errorf("sent %v", got)
	}
}

func TestALoadIsNotTriedAgain(t *testing.T) {
	var tries atomic.Int32
	client := serve(t, &script{load: func(*headracev1.LoadAdapterRequest) (*headracev1.LoadAdapterResponse, error) {
		tries.Add(1)
		return nil, status.Error(codes.Unavailable, "no")
	}})
	_, err := client.Control().LoadAdapter(soon(t), "a", "a", nil)
	if asError(t, err).Code != codes.Unavailable || tries.Load() != 1 {
		t.Errorf("%d tries ended with %v", tries.Load(), err)
	}
}

func TestRequestsOfAnUnloadedAdapterHaveTheTimeThatWasGiven(t *testing.T) {
	var got []*headracev1.UnloadAdapterRequest
	client := serve(t, &script{unload: func(request *headracev1.UnloadAdapterRequest) *headracev1.UnloadAdapterResponse {
		got = append(got, request)
		return &headracev1.UnloadAdapterResponse{LiveRequests: 3}
	}})
	for _, grace := range []*time.Duration{nil, headrace.Ptr(time.Duration(0)), headrace.Ptr(time.Minute)} {
		if live, err := client.Control().UnloadAdapter(soon(t), "a", grace); err != nil || live != 3 {
			t.Fatalf("%d requests, %v", live, err)
		}
	}
	if got[0].GetTimeout() != nil || got[1].GetTimeout() == nil || got[1].GetTimeout().AsDuration() != 0 ||
		got[2].GetTimeout().AsDuration() != time.Minute {
		t.Errorf("sent %v", got)
	}
}

func TestAdaptersAreListedFromAllPages(t *testing.T) {
	client := serve(t, &script{list: func(request *headracev1.ListAdaptersRequest) *headracev1.ListAdaptersResponse {
		if request.GetPageToken() == "" {
			return &headracev1.ListAdaptersResponse{Adapters: []*headracev1.Adapter{{Name: "a"}, {Name: "b"}}, NextPageToken: "c"}
		}
		return &headracev1.ListAdaptersResponse{Adapters: []*headracev1.Adapter{{Name: request.GetPageToken()}}}
	}})
	found, err := client.Adapters(soon(t))
	var names []string
	for _, one := range found {
		names = append(names, one.GetName())
	}
	if err != nil || !slices.Equal(names, []string{"a", "b", "c"}) {
		t.Errorf("got %v, %v", names, err)
	}
}

func TestControlIsOfOneServer(t *testing.T) {
	checkGoroutines(t)
	client, err := headrace.NewClient("127.0.0.1:1,127.0.0.1:2")
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	_, err = client.Control().UnloadAdapter(soon(t), "a", nil)
	failure := asError(t, err)
	if failure.Code != codes.InvalidArgument || failure.Fields[0].Field != "target" {
		t.Errorf("got %v", err)
	}
}
